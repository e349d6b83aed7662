"""tekken.json as tokenizer.json: a byte-level BPE whose merges follow from the ranks of its tokens, and a chat template.

Distrusts the file: its size and counts are checked before memory is taken for them. Source: mistral-common's description of
the format.
"""

from __future__ import annotations

import base64
from collections.abc import Collection
from pathlib import Path
from typing import Any

from quire.errors import ConfigError
from quire.models.bytes_in_tokens import byte_alphabet
from quire.models.json_files import read_json

MOST_TOKENS, LONGEST_TOKEN = 1 << 20, 256

OLD_SPECIAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)  # fmt: skip
"""Special tokens of files that do not list theirs; the next are <SPECIAL_20>, ..."""

TEMPLATE = """{{- bos_token }}
{%- if tools %}{{- raise_exception('the chat template of tekken.json has no tools: set one with --chat-template') }}{%- endif %}
{%- set system = namespace(text='') %}
{%- macro text_of(content) %}{%- if content is string %}{{- content }}{%- else %}{%- for part in content %}{%- if part['type'] == 'audio' %}{{- '[BEGIN_AUDIO][AUDIO]' }}{%- elif part['type'] == 'image' %}{{- '[IMG]' }}{%- else %}{{- part['text'] }}{%- endif %}{%- endfor %}{%- endif %}{%- endmacro %}
{%- for message in messages %}
{%- if message['role'] == 'system' %}SYSTEM
{%- elif message['role'] == 'user' %}{{- '[INST]' }}{%- if loop.last and system.text %}{{- system.text + '\\n\\n' }}{%- endif %}{{- text_of(message['content']) + '[/INST]' }}
{%- elif message['role'] == 'assistant' %}{{- text_of(message['content']) + eos_token }}
{%- else %}{{- raise_exception('roles are system, user and assistant') }}{%- endif %}
{%- endfor %}"""
SYSTEM = "{{- '[SYSTEM_PROMPT]' + text_of(message['content']) + '[/SYSTEM_PROMPT]' }}"
OLD_SYSTEM = "{%- set system.text = text_of(message['content']) %}"
"""Versions before v7 put the system prompt before the last message."""


class TekkenTokenizer:
    """The tokenizer of a tekken.json.

    Raises:
        ConfigError: the file is damaged; the message names it.
    """

    def __init__(self, file: Path):
        self.file = file
        found = read_json(file)
        try:
            self._read(found)
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
            raise ConfigError(f"{file} is not a tekken.json: {error!r:.200}") from None

    def _read(self, found: dict[str, Any]) -> None:
        config = found["config"]
        size, num_special = int(config["default_vocab_size"]), int(config["default_num_special_tokens"])  # fmt: skip
        if not 0 < num_special < size <= MOST_TOKENS:
            raise ValueError(f"{size} tokens, {num_special} of them special")
        self.pattern, self.version = str(config["pattern"]), str(config.get("version", "v3"))
        listed = found.get("special_tokens") or [
            {"rank": i, "token_str": text} for i, text in enumerate(OLD_SPECIAL[:num_special])
        ]
        texts = {int(each["rank"]): str(each["token_str"]) for each in listed}
        self.special = [texts.get(i, f"<SPECIAL_{i}>") for i in range(num_special)]
        if len(set(self.special)) < num_special:
            raise ValueError("two special tokens have one text")
        vocabulary = found["vocab"][: size - num_special]
        self.tokens = [base64.b64decode(each["token_bytes"], validate=True) for each in vocabulary]
        if any(not 0 < len(token) <= LONGEST_TOKEN for token in self.tokens):
            raise ValueError(f"a token is empty, or longer than {LONGEST_TOKEN} bytes")
        if len(set(self.tokens)) < len(self.tokens):
            raise ValueError("two tokens have the same bytes")

    def files(self, there: Collection[str] = ()) -> dict[str, object]:
        """The files of a checkpoint directory, but those that are `there`."""
        named = {"bos": "<s>", "eos": "</s>", "unk": "<unk>", "pad": "<pad>"}
        config: dict[str, object] = {
            f"{name}_token": text for name, text in named.items() if text in self.special
        }
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        if "chat_template.jinja" not in there and {"[INST]", "[/INST]"} <= set(self.special):
            old = self.version < "v7" and not self.version.startswith("v1")
            config["chat_template"] = TEMPLATE.replace(
                "SYSTEM\n", (OLD_SYSTEM if old else SYSTEM) + "\n", 1
            )
        found = {"tokenizer.json": self.tokenizer_json(), "tokenizer_config.json": config}
        return {name: text for name, text in found.items() if name not in there}

    def tokenizer_json(self) -> dict[str, Any]:
        letters = {byte: letter for letter, byte in byte_alphabet().items()}
        first = len(self.special)
        spelled = ["".join(letters[byte] for byte in token) for token in self.tokens]
        vocab = {text: first + i for i, text in enumerate(spelled)}
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        split = {"type": "Split", "pattern": {"Regex": self.pattern}, "behavior": "Isolated", "invert": False}  # fmt: skip
        to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}  # fmt: skip
        sequence: dict[str, Any] = {"Sequence": {"id": "A", "type_id": 0}}
        bos = {"SpecialToken": {"id": "<s>", "type_id": 0}}
        second = {"Sequence": {"id": "B", "type_id": 0}}
        around = {
            "type": "TemplateProcessing", "single": [bos, sequence], "pair": [bos, sequence, second],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [self.special.index("<s>")], "tokens": ["<s>"]}},
        } if "<s>" in self.special else None  # fmt: skip
        model = {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
            "fuse_unk": False, "byte_fallback": False, "ignore_merges": True, "vocab": {**dict(zip(self.special, range(first), strict=True)), **vocab},
            "merges": self._merges(spelled),
        }  # fmt: skip
        return {
            "version": "1.0", "truncation": None, "padding": None, "normalizer": None,
            "added_tokens": [{"id": i, "content": text, **flags, "special": True} for i, text in enumerate(self.special)],
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, to_bytes]}, "post_processor": around,
            "decoder": {**to_bytes, "add_prefix_space": True, "use_regex": True}, "model": model,
        }  # fmt: skip

    @staticmethod
    def _merges(spelled: list[str]) -> list[tuple[str, str]]:
        """The neighbours whose token has the lowest rank are merged first, so all pairs that make the token have its rank."""
        ranks = {text: rank for rank, text in enumerate(spelled)}
        merges = []
        for text in spelled:
            cuts = ((text[:cut], text[cut:]) for cut in range(1, len(text)))
            pairs = [pair for pair in cuts if pair[0] in ranks and pair[1] in ranks]
            merges += sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        return merges
