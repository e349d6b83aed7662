"""The tokenizer of a GGUF file, as the files that `tokenizers` reads: tokenizer.json, tokenizer_config.json, and the
end tokens and defaults for generation_config.json.

Knows the keys tokenizer.* and general.sampling.*, byte-level BPE ("gpt2") and SentencePiece's BPE ("llama"; "gemma4", which lists its merges). Does not know
paths, and does not import the library.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from quire.errors import ConfigError, Unsupported
from quire.models.gguf.header import GgufHeader

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
SPACE = "\u2581"
NAMED = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
END_TEXTS = frozenset(
    "<|eot_id|> <|eom_id|> <|im_end|> <|end|> <end_of_turn> <|endoftext|> <|end_of_text|> <EOT> <|return|>".split()
)
"""Control tokens that end a turn, though some files do not name them."""
SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
LONGEST_TOKEN = 1024  # bytes of a token that is split into pairs
REMEDY = "pass the tokenizer of its safetensors checkpoint with --tokenizer"


class SplitRule(NamedTuple):
    split: tuple[str, ...]
    bos: bool = False
    whole: bool = False
    normalizer: str | None = None


@functools.cache
def split_rules() -> dict[str, SplitRule]:
    """By `tokenizer.ggml.pre`."""
    text = Path(__file__).with_name("pre_tokenizers.toml").read_text("utf-8")
    found: dict[str, SplitRule] = {}
    for row in tomllib.loads(text)["rule"]:
        names, split = row.pop("names").split(), tuple(row.pop("split"))
        found |= dict.fromkeys(names, SplitRule(split, **row))
    return found


class GgufTokenizer:
    """Reads the keys of a tokenizer.

    Raises:
        Unsupported: a kind of tokenizer that is not known. ConfigError: its values contradict each other.
    """

    def __init__(self, header: GgufHeader):
        self.file, self.metadata = header.files[0], header.metadata
        self.model, self.gemma = str(self.get("model")), header.architecture.startswith("gemma")
        if self.model not in ("gpt2", "llama", "gemma4"):
            raise Unsupported(f"{self.file} (a tokenizer of the kind {self.model!r})", REMEDY)
        self.tokens: list[str] = self._list("tokens", str)
        self.kinds: list[int] = self._list("token_type", int, optional=True)
        if self.gemma:  # runs of spaces are spelled out
            self.tokens = [SPACE * len(t) if t and not t.strip(" ") else t for t in self.tokens]
        self.ids = {token: i for i, token in enumerate(self.tokens)}
        self.named: dict[str, str] = {}
        self.rule = split_rules().get(str(self.get("pre", "default")))
        if self.model == "gpt2" and self.rule is None:
            raise Unsupported(f"{self.file} (tokenizer.ggml.pre={self.get('pre')!r})", REMEDY)

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{key}", default)

    def _list(self, key: str, kind: type, optional: bool = False) -> list[Any]:
        found = self.get(key, [])
        wrong = not isinstance(found, list) or not all(isinstance(each, kind) for each in found)
        if wrong or not (found or optional):
            raise ConfigError(f"{self.file}: tokenizer.ggml.{key} is no list of {kind.__name__}")
        if key != "tokens" and found and key != "merges" and len(found) != len(self.tokens):
            raise ConfigError(
                f"{self.file}: tokenizer.ggml.{key} has {len(found)} values for {len(self.tokens)} tokens"
            )
        return list(found)

    def kind(self, i: int) -> int:
        return self.kinds[i] if self.kinds else NORMAL

    def token_of(self, key: str) -> tuple[int, str] | None:
        """The id and the text of a token that a key names."""
        i = self.get(key)
        if not isinstance(i, int) or not 0 <= i < len(self.tokens):
            return None
        return i, self.tokens[i]

    def stand_for(self, token: str) -> None:
        """See that there is a token of this text: the unknown token, which no text has, takes it if there is none.

        Raises:
            Unsupported: texts may have the unknown token.
        """
        if token in self.ids:
            return
        unknown = self.token_of("unknown_token_id")
        if unknown is None or self.model == "gpt2":
            raise Unsupported(f"{self.file} (a tokenizer without {token}) for pictures", REMEDY)
        self.tokens[unknown[0]] = token
        self.ids = {text: i for i, text in enumerate(self.tokens)}

    def name_tokens(self, named: dict[str, str]) -> None:
        """Attributes that the tokenizer shall have: name -> token. Raises Unsupported: there is no such token."""
        if missing := [token for token in named.values() if token not in self.ids]:
            raise Unsupported(
                f"{self.file} (a tokenizer without {missing[0]}) for pictures", REMEDY
            )
        self.named = named

    # -- the files
    def tokenizer_json(self) -> dict[str, Any]:
        bytes_ = self.model == "gpt2"
        listed = bytes_ or bool(self.get("merges"))
        merges = self._byte_merges() if listed else self._merges_by_score()
        unknown = (
            None
            if bytes_
            else self.token_of("unknown_token_id") or self.token_of("padding_token_id")
        )
        model = {
            "type": "BPE", "dropout": None, "unk_token": unknown[1] if unknown else None,
            "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": not bytes_,
            "byte_fallback": not bytes_, "ignore_merges": bool(self.rule and bytes_ and self.rule.whole),
            "vocab": self.ids, "merges": merges,
        }  # fmt: skip
        return {
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": self._added(),
            "normalizer": self._normalizer(bytes_), "pre_tokenizer": self._pre_tokenizer() if bytes_ else None,
            "post_processor": self._post_processor(), "decoder": self._decoder(bytes_), "model": model,
        }  # fmt: skip

    def tokenizer_config(self) -> dict[str, Any]:
        named = {name: self.token_of(f"{key}_token_id") for key, name in NAMED.items()}
        found: dict[str, Any] = {name: token[1] for name, token in named.items() if token}
        template = self.metadata.get("tokenizer.chat_template")
        if isinstance(template, str):
            found["chat_template"] = template
        if self.named:
            found["extra_special_tokens"] = self.named
        return {"tokenizer_class": "PreTrainedTokenizerFast", **found}

    def generation_config(self) -> dict[str, Any]:
        ends = [token[0] for key in ENDS if (token := self.token_of(key))]
        texts = (self.ids[text] for text in END_TEXTS if text in self.ids)
        ends += sorted(i for i in texts if self.kind(i) == CONTROL and i not in ends)
        found: dict[str, Any] = {"eos_token_id": list(dict.fromkeys(ends))} if ends else {}
        for key, name in SAMPLING.items():
            value = self.metadata.get(f"general.sampling.{key}")
            if isinstance(value, int | float) and not isinstance(value, bool):
                found[name] = value
        return found

    # -- their parts
    def _added(self) -> list[dict[str, Any]]:
        """Tokens that are found in the text as they are: control tokens, and those that the model's makers added."""
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return [
            {"id": i, "content": token, **flags, "special": self.kind(i) != USER_DEFINED}
            for token, i in sorted(self.ids.items(), key=lambda item: item[1])
            if token and self.kind(i) in (CONTROL, USER_DEFINED, UNKNOWN) and token.strip(SPACE)
        ]

    def _byte_merges(self) -> list[list[str]]:
        pairs = [merge.split(" ") for merge in self._list("merges", str)]
        ids = self.ids  # a pair whose parts or result are no tokens would be refused
        return [
            p for p in pairs if len(p) == 2 and p[0] in ids and p[1] in ids and p[0] + p[1] in ids
        ]

    def _merges_by_score(self) -> list[tuple[str, str]]:
        """SentencePiece merges the pair with the best score, so a token's score is the rank of all pairs that make it."""
        scores: Sequence[float] = self._list("scores", float)
        if self.gemma:  # its order is the tokens' order
            scores = range(0, -len(self.tokens), -1)
        ids, kinds = self.ids, (NORMAL, USER_DEFINED)

        def pairs() -> Iterator[tuple[float, int, int, str, str]]:
            for token, i in ids.items():
                if self.kind(i) not in kinds or not 1 < len(token) <= LONGEST_TOKEN:
                    continue
                for cut in range(1, len(token)):
                    left, right = token[:cut], token[cut:]
                    if left in ids and right in ids:
                        yield -scores[i], ids[left], ids[right], left, right

        return [(left, right) for *_, left, right in sorted(pairs())]

    def _prefix(self) -> bool:
        return bool(self.get("add_space_prefix", not self.gemma))

    def _normalizer(self, bytes_: bool) -> dict[str, Any] | None:
        if bytes_:
            return {"type": self.rule.normalizer} if self.rule and self.rule.normalizer else None
        spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
        if not self._prefix():
            return spaces
        return {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, spaces]}

    def _pre_tokenizer(self) -> dict[str, Any]:
        splits = [
            {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
            for regex in (self.rule.split if self.rule else ())
        ]
        to_bytes = {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": False,
        }
        return {"type": "Sequence", "pretokenizers": [*splits, to_bytes]}

    def _decoder(self, bytes_: bool) -> dict[str, Any]:
        if bytes_:
            return {
                "type": "ByteLevel",
                "add_prefix_space": True,
                "trim_offsets": True,
                "use_regex": True,
            }
        steps: list[dict[str, Any]] = [
            {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]
        if self._prefix():
            steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        return {"type": "Sequence", "decoders": steps}

    def _post_processor(self) -> dict[str, Any] | None:
        """What surrounds a text: BOS before it and EOS after it, as the file says."""
        default = self.model != "gpt2" or bool(self.rule and self.rule.bos)
        bos = self.token_of("bos_token_id") if self.get("add_bos_token", default) else None
        eos = self.token_of("eos_token_id") if self.get("add_eos_token", False) else None
        tokens = [token for token in (bos, eos) if token]
        if not tokens:
            return None

        def around(name: str, kind: int) -> list[dict[str, Any]]:
            parts: list[dict[str, Any]] = [{"Sequence": {"id": name, "type_id": kind}}]
            if bos:
                parts.insert(0, {"SpecialToken": {"id": bos[1], "type_id": kind}})
            if eos:
                parts.append({"SpecialToken": {"id": eos[1], "type_id": kind}})
            return parts

        return {
            "type": "TemplateProcessing",
            "single": around("A", 0),
            "pair": [*around("A", 0), *around("B", 1)],
            "special_tokens": {
                text: {"id": text, "ids": [i], "tokens": [text]} for i, text in tokens
            },
        }
