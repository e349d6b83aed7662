"""PoolingInfo: what the frontend must know about a model that computes vectors or scores instead of tokens.

Knows names and sizes. Does not know how the worker computes them.
"""

from __future__ import annotations

from msgspec import Struct


class PoolingInfo(Struct, omit_defaults=True, kw_only=True):
    """Tasks and sizes of a pooling model, a part of EngineReady."""

    tasks: list[str]
    """The supported tasks; the first is the default."""
    num_dimensions: int = 0
    """Length of a full vector; 0: the model has no vectors."""
    matryoshka: list[int] | None = None
    """The lengths to which vectors may be cut; []: any; None: vectors cannot be cut."""
    normalizes: bool = True
    """Whether vectors have length 1 unless a request says otherwise."""
    labels: list[str] = []
    """The names of the classes, in order."""
    num_labels: int = 0
    use_sep_token: bool = True
    """A pair of texts is tokenized as a pair, with the tokenizer's separators; False: the texts are concatenated."""
    prompts: dict[str, str] = {}
    """Texts that may be put before an input, by name."""
    task_instructions: dict[str, str] = {}
    """The same, from config.json."""
    include_prompt: bool = True
    """Whether the tokens of such a text count in the vector."""
    do_lower_case: bool = False
    """Texts are converted to lower case before they are tokenized."""
    cached_tasks: list[str] = []
    """The tasks whose requests may use the prefix cache."""
    chunked: bool = False
    """Texts beyond the model's length are embedded in pieces."""
    max_embed_len: int = 0
    """The longest text in tokens where texts are embedded in pieces; 0: any length."""
    default_activation: bool = True
    """Whether scores become probabilities unless a request says otherwise."""
    similarity: str = "cosine"
    """cosine, dot, euclidean or manhattan: how the checkpoint compares vectors."""
    architecture: str = ""
    """As config.json names it."""
