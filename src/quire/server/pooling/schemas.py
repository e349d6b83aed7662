"""Request bodies of the pooling routes: one Struct each.

Knows names, types and defaults. Nulls mean "absent", and are removed before.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class PoolingBody(Struct, kw_only=True):
    """The common fields."""

    model: str | None = None
    user: str | None = None
    request_id: str | None = None
    priority: int = 0
    timeout: float | None = None
    cache_salt: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    add_special_tokens: bool | None = None
    use_activation: bool | None = None
    normalize: Any = None
    padding: Any = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    mm_processor_kwargs: dict[str, Any] | None = None


class InputBody(PoolingBody, kw_only=True):
    """The fields of routes whose inputs are single texts."""

    input: Any = None
    messages: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    tools: list[dict[str, Any]] | None = None
    prompt_name: str | None = None
    dimensions: int | None = None
    encoding_format: str = "float"
    embed_dtype: str = "float32"
    endianness: str = "native"


class EmbeddingsRequest(InputBody, kw_only=True):
    """OpenAI's embeddings."""


class PoolingRequest(InputBody, kw_only=True):
    """The tensor of any task."""

    task: str | None = None


class ClassifyRequest(InputBody, kw_only=True):
    """The probabilities of classes."""


class PairBody(PoolingBody, kw_only=True):
    """The fields of routes whose inputs are pairs."""

    instruction: str | None = None
    max_tokens_per_query: int = 0
    max_tokens_per_doc: int = 0


class ScoreRequest(PairBody, kw_only=True):
    """One of four pairs of fields; each a text or a list of texts."""

    queries: Any = None
    documents: Any = None
    items: Any = None
    data_1: Any = None
    data_2: Any = None
    text_1: Any = None
    text_2: Any = None


class RerankRequest(PairBody, kw_only=True):
    """Jina's and Cohere's reranking."""

    query: Any = None
    documents: Any = None
    top_n: int = 0
    return_documents: bool = True


class CohereEmbedRequest(Struct, kw_only=True):
    """Cohere's embed, version 2."""

    model: str | None = None
    texts: list[str] | None = None
    images: list[Any] | None = None
    inputs: list[dict[str, Any]] | None = None
    input_type: str | None = None
    output_dimension: int | None = None
    embedding_types: list[str] | None = None
    truncate: str = "END"
    max_tokens: int | None = None
    request_id: str | None = None
    priority: int = 0
    timeout: float | None = None
