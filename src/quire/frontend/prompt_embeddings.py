"""Prompts that are embeddings: checks the matrices that programs and clients give (`array_files.py`), and names them for the prefix cache.

Does not know the model: `InputProcessor` checks the number of tokens and features.

Shape suffixes: N tokens, D features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from quire.errors import ValidationError
from quire.frontend.array_files import Matrix, MatrixError, matrix_in, matrix_of
from quire.protocol.request import EMBEDDINGS, MediaItem

TOKENS_OF_AN_ITEM = 16
"""A block of the prefix cache depends on the items that overlap it, so prompts share their equal beginnings."""
ENABLE = "prompts as embeddings are off; start the engine with --enable-prompt-embeds (enable_prompt_embeds=True), or send text or token ids"


@dataclass(slots=True)
class PromptEmbeddings(Matrix):
    """A prompt of N tokens as their embeddings."""

    @property
    def num_tokens(self) -> int:
        return len(self.array_ND)

    def media(self) -> list[MediaItem]:
        """What an engine request carries of it. The hashes depend on dtype and bytes."""
        items = []
        for start in range(0, len(self.array_ND), TOKENS_OF_AN_ITEM):
            part_ND = self.array_ND[start : start + TOKENS_OF_AN_ITEM]
            data, kind = part_ND.tobytes(), EMBEDDINGS + self.dtype
            digest = sha256(f"{kind}:{part_ND.shape}:".encode() + data).hexdigest()
            items.append(MediaItem(digest, kind, start, len(part_ND), data))
        return items


def wrong(what: str, value: Any = None) -> ValidationError:
    return ValidationError(f"prompt_embeds: {what}", parameter="prompt_embeds", value=value)


@contextmanager
def _named() -> Iterator[None]:
    """Errors of matrices with the name of the field."""
    try:
        yield
    except MatrixError as why:
        raise wrong(str(why), why.value) from None


def read_embeddings(given: Any) -> PromptEmbeddings:
    """A PyTorch tensor or a NumPy array [N, D], or [1, N, D]; of float32, float16 or bfloat16.

    Raises:
        ValidationError: as `matrix_of`.
    """
    if isinstance(given, PromptEmbeddings):
        return given
    with _named():
        found = matrix_of(given)
    return PromptEmbeddings(found.dtype, found.array_ND)


def fitting(given: Any, size: int, most: int | None, keep_first: bool) -> PromptEmbeddings:
    """What was given, truncated to the first or last `most` tokens. `size`: features of an embedding; 0: none are taken.

    Raises:
        ValidationError: the engine takes no embeddings, or others; and as `read_embeddings`.
    """
    if not size:
        raise ValidationError(ENABLE, parameter="prompt_embeds")
    read = read_embeddings(given)
    features = read.array_ND.shape[1]
    if features != size:
        raise wrong(
            f"has {features} numbers for each token; an embedding of this model has {size} (hidden_size)",
            features,
        )
    if most is None or read.num_tokens <= most:
        return read
    kept_ND = read.array_ND[:most] if keep_first else read.array_ND[-most:]
    return PromptEmbeddings(read.dtype, kept_ND)


def check_has_tokens(media: Sequence[MediaItem], parameter: str = "prompt_logprobs") -> None:
    """Raises ValidationError: a part of the prompt is embeddings, and `parameter` needs its tokens."""
    if any(item.kind.startswith(EMBEDDINGS) for item in media):
        raise ValidationError(
            f"{parameter}: a prompt of embeddings has no token ids and no text; leave {parameter} out",
            parameter=parameter,
        )


def decode_embeddings(text: str, most_tokens: int, size: int) -> PromptEmbeddings:
    """Base64 of a file of safetensors or NumPy with one array. `most_tokens`, `size`: the bounds of its shape.

    Raises:
        ValidationError: it is something else, or larger; and as `read_embeddings`.
    """
    if not size:
        raise ValidationError(ENABLE, parameter="prompt_embeds")
    with _named():
        found = matrix_in(text, most_tokens, size)
    return PromptEmbeddings(found.dtype, found.array_ND)
