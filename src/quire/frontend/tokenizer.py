"""Tokenizer: one interface over `tokenizers` and transformers - encode, decode, special tokens, chat template.

`load` reads tokenizer.json with the `tokenizers` library alone, without transformers or torch, so it takes only as
long as reading the file. For a checkpoint without that file, or with `tokenizer_mode="slow"`, it imports transformers.
Does not know requests or streams.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from quire.errors import ConfigError, ModelNotFound
from quire.frontend.chat_template import ChatTemplate
from quire.logging import get_logger
from quire.models.bytes_in_tokens import byte_alphabet, byte_token
from quire.models.json_files import read_object

log = get_logger(__name__)

NAMED = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip


class Encoding(dict[str, Any]):
    """Result of calling a tokenizer: `input_ids` and `attention_mask`, as keys and as attributes."""

    @property
    def input_ids(self) -> Any:
        return self["input_ids"]

    @property
    def attention_mask(self) -> Any:
        return self["attention_mask"]


class Tokenizer:
    """Text to ids and back.

    `backend` is a `tokenizers.Tokenizer`, or a transformers tokenizer if `slow`. Attributes that this class lacks come
    from the transformers tokenizer of the same files, loaded on first use.
    """

    def __init__(
        self,
        backend: Any,
        *,
        folder: str,
        named: dict[str, str],
        chat_template: ChatTemplate | None,
        slow: bool = False,
        trust_remote_code: bool = False,
        config: dict[str, Any] | None = None,
    ):
        self.backend, self.name_or_path, self.is_slow = backend, folder, slow
        self.special_tokens_map = named
        self.template = chat_template
        self.config = config or {}
        self._trust = trust_remote_code
        self._added = _added_tokens(backend, slow)
        self.special_ids = frozenset(i for i, special in self._added.items() if special)
        self._pieces: dict[int, str] = {}
        self._raw: dict[int, bytes] = {}
        self._whole: dict[int, str | None] = {}

    # -- text to ids ----------------------------------------------------------------------------
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if self.is_slow:
            return list(self.backend.encode(text, add_special_tokens=add_special_tokens))
        # encode_batch_fast skips offsets; there is no such method for a single text.
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[list[int]]:
        if self.is_slow:
            return [self.encode(text, add_special_tokens) for text in texts]
        encodings = self.backend.encode_batch_fast(
            list(texts), add_special_tokens=add_special_tokens
        )
        return [list(one.ids) for one in encodings]

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True) -> Encoding:
        if isinstance(text, str):
            ids: Any = self.encode(text, add_special_tokens)
            return Encoding(input_ids=ids, attention_mask=[1] * len(ids))
        many = self.encode_batch(text, add_special_tokens)
        return Encoding(input_ids=many, attention_mask=[[1] * len(ids) for ids in many])

    # -- ids to text ----------------------------------------------------------------------------
    def decode(self, ids: int | Iterable[int], skip_special_tokens: bool = False) -> str:
        ids = [ids] if isinstance(ids, int) else list(ids)
        return str(self.backend.decode(ids, skip_special_tokens=skip_special_tokens))

    def token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it; None if there is no such id."""
        if self.is_slow:
            token = self.backend.convert_ids_to_tokens(token_id)
        else:
            token = self.backend.id_to_token(token_id)
        return None if token is None else str(token)

    def piece(self, token_id: int) -> str:
        """The text that one token adds, leading space included; "" for an id without a token.

        A token that holds only a part of a character gives "�".
        """
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._piece(token_id)
        return piece

    def _piece(self, token_id: int) -> str:
        raw = self.raw_bytes(token_id)
        if raw is not None:
            return raw.decode("utf-8", "replace")
        if self.token(token_id) is None:
            return ""
        # Decoders strip the space before the first token, so decode this one after another token.
        anchor = self._anchor
        if anchor is None or token_id in self._added:
            return self.decode([token_id])
        before, both = self.decode([anchor]), self.decode([anchor, token_id])
        return both[len(before) :] if both.startswith(before) else self.decode([token_id])

    @functools.cached_property
    def _anchor(self) -> int | None:
        ids = self.encode("a", add_special_tokens=False)
        return ids[-1] if ids else None

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of a token, also when it holds only a part of a character."""
        raw = self.raw_bytes(token_id)
        if raw is not None:
            return raw
        if (byte := byte_token(self.token(token_id))) is not None:
            return bytes([byte])
        return self.piece(token_id).encode()

    def raw_bytes(self, token_id: int) -> bytes | None:
        """The bytes that the token adds to the text; None if the decoder is not byte-level."""
        if not self.is_byte_level:
            return None
        raw = self._raw.get(token_id)
        if raw is None:
            raw = self._raw[token_id] = self._spelled(token_id)
        return raw

    def whole_text(self, token_id: int) -> str | None:
        """The text of a token whose bytes are complete characters; None for other tokens.

        For byte-level decoders only.
        """
        try:
            return self._whole[token_id]
        except KeyError:
            pass
        try:
            text = (self.raw_bytes(token_id) or b"").decode()
        except UnicodeDecodeError:
            text = None
        self._whole[token_id] = text
        return text

    def _spelled(self, token_id: int) -> bytes:
        token = self.token(token_id)
        if token is None:
            return b""
        alphabet = byte_alphabet()
        try:
            return bytes(alphabet[char] for char in token)
        except KeyError:  # an added token with characters outside the byte alphabet
            return token.encode()

    @functools.cached_property
    def is_byte_level(self) -> bool:
        """The vocabulary spells tokens with one character per byte (GPT-2); text is the concatenation of the bytes."""
        if self.is_slow:
            return False
        return type(self.backend.decoder).__name__ == "ByteLevel"

    def is_added(self, token_id: int) -> bool:
        return token_id in self._added

    # -- names ----------------------------------------------------------------------------------
    def __len__(self) -> int:
        return int(len(self.backend) if self.is_slow else self.backend.get_vocab_size())

    @property
    def vocab_size(self) -> int:
        """Number of tokens without the added ones; `len()` includes them."""
        if self.is_slow:
            return int(self.backend.vocab_size)
        return int(self.backend.get_vocab_size(with_added_tokens=False))

    @property
    def all_special_ids(self) -> list[int]:
        return sorted(self.special_ids)

    @property
    def all_special_tokens(self) -> list[str]:
        return [token for i in self.all_special_ids if (token := self.token(i)) is not None]

    def get_vocab(self) -> dict[str, int]:
        return dict(self.backend.get_vocab())

    def token_id(self, token: str) -> int | None:
        if self.is_slow:
            number = self.backend.convert_tokens_to_ids(token)
        else:
            number = self.backend.token_to_id(token)
        return None if number is None else int(number)

    def convert_ids_to_tokens(self, ids: int | Iterable[int]) -> Any:
        return self.token(ids) if isinstance(ids, int) else [self.token(i) for i in ids]

    def convert_tokens_to_ids(self, tokens: str | Iterable[str]) -> Any:
        return (
            self.token_id(tokens) if isinstance(tokens, str) else [self.token_id(t) for t in tokens]
        )

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens_map.get(name)
        return None if token is None else self.token_id(token)

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens_map.get("eos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._named_id("eos_token")

    @property
    def bos_token(self) -> str | None:
        return self.special_tokens_map.get("bos_token")

    @property
    def bos_token_id(self) -> int | None:
        return self._named_id("bos_token")

    @property
    def pad_token(self) -> str | None:
        return self.special_tokens_map.get("pad_token")

    @property
    def pad_token_id(self) -> int | None:
        return self._named_id("pad_token")

    @property
    def chat_template(self) -> str | None:
        return self.template.source if self.template is not None else None

    def apply_chat_template(
        self,
        conversation: Sequence[dict[str, Any]],
        *,
        tools: list[Any] | None = None,
        documents: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **variables: Any,
    ) -> str | list[int]:
        """Render a conversation as the prompt text, or as token ids with `tokenize`."""
        template = ChatTemplate(chat_template) if chat_template is not None else self.template
        if template is None:
            raise ConfigError(
                f"{self.name_or_path} has no chat template; pass one as chat_template"
            )
        text = template.render(
            conversation, tools=tools, documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables={**self.special_tokens_map, **variables},
        )  # fmt: skip
        return self.encode(text, add_special_tokens=False) if tokenize else text

    @functools.cached_property
    def full(self) -> Any:
        """The transformers tokenizer of the same files (imports transformers)."""
        if self.is_slow:
            return self.backend
        return load_with_transformers(self.name_or_path, self._trust, fast=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.full, name)


def _added_tokens(backend: Any, slow: bool) -> dict[int, bool]:
    """Id -> is special, for each token added to the vocabulary."""
    decoder = backend.added_tokens_decoder if slow else backend.get_added_tokens_decoder()
    is_special = {int(i): bool(token.special) for i, token in decoder.items()}
    if slow:
        is_special |= dict.fromkeys((int(i) for i in backend.all_special_ids), True)
    return is_special


def load(
    folder: str,
    *,
    mode: str = "auto",
    trust_remote_code: bool = False,
    chat_template: str | None = None,
) -> Tokenizer:
    """Load the tokenizer of a checkpoint directory.

    `chat_template`: a path or the template itself; None: the checkpoint's.

    Raises:
        ModelNotFound: the directory has no tokenizer.
        ConfigError: a file in it is damaged, or the mode is unknown.
    """
    # mistral: tekken.json has become tokenizer.json
    if mode not in ("auto", "hf", "slow", "mistral"):
        raise ConfigError(f"tokenizer_mode must be auto, hf, slow or mistral, not {mode!r}")
    path = Path(folder)
    config = read_object(path / "tokenizer_config.json")
    named = special_tokens(path, config)
    template = ChatTemplate.find(path, config, chat_template)
    if (
        mode != "slow"
        and (path / "tokenizer.json").is_file()
        and not _own_code(config, trust_remote_code)
    ):
        backend = _load_fast(path, config, named)
        return Tokenizer(
            backend, folder=folder, named=named, chat_template=template, config=config,
            trust_remote_code=trust_remote_code,
        )  # fmt: skip
    backend = load_with_transformers(folder, trust_remote_code, fast=mode != "slow")
    named = {
        name: str(token) for name, token in backend.special_tokens_map.items() if name in NAMED
    }
    if template is None and isinstance(backend.chat_template, str):
        template = ChatTemplate(backend.chat_template)
    return Tokenizer(
        backend, folder=folder, named=named, chat_template=template, slow=True, config=config,
        trust_remote_code=trust_remote_code,
    )  # fmt: skip


def _own_code(config: dict[str, Any], trust_remote_code: bool) -> bool:
    return trust_remote_code and "AutoTokenizer" in (config.get("auto_map") or {})


def _load_fast(path: Path, config: dict[str, Any], named: dict[str, str]) -> Any:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Fast

    try:
        backend = Fast.from_file(str(path / "tokenizer.json"))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{path / 'tokenizer.json'} cannot be read: {error}") from error
    backend.no_truncation()  # files saved during training may enable either
    backend.no_padding()
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for _, token in sorted(
        (config.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0])
    ):
        if token["content"] not in known:
            flags = ("lstrip", "rstrip", "normalized", "single_word", "special")
            backend.add_tokens(
                [AddedToken(token["content"], **{k: token[k] for k in flags if k in token})]
            )
            known.add(token["content"])
    missing = [token for token in named.values() if token not in known]
    if missing:
        backend.add_special_tokens([AddedToken(token, special=True) for token in missing])
    # tokenizer.json's post-processor overrides add_bos_token and add_eos_token of tokenizer_config.json, as in
    # transformers 5.
    return backend


def special_tokens(path: Path, config: dict[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, ... -> text, from tokenizer_config.json, else from special_tokens_map.json."""
    tokens = {
        **read_object(path / "special_tokens_map.json"),
        **{k: config.get(k) for k in NAMED if k in config},
    }
    named = {}
    for name in NAMED:
        token = tokens.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            named[name] = token
    return named


def load_with_transformers(folder: str, trust_remote_code: bool, fast: bool) -> Any:
    """Load the transformers tokenizer.

    Raises:
        ModelNotFound: transformers cannot load one; the message quotes its error.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            folder, use_fast=fast, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError, ImportError, KeyError, TypeError, AttributeError) as error:
        raise ModelNotFound(
            f"no tokenizer in {folder}: {str(error).splitlines()[0] if str(error) else type(error).__name__}; set"
            " another with tokenizer=..., or use token ids only with skip_tokenizer_init=True"
        ) from error
