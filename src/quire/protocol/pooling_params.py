"""PoolingParams: which output of a prompt's hidden states a request asks for. Such a request generates no tokens.

Knows the rules that a value must satisfy by itself. Does not know which tasks a model has.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from quire.protocol import validators as read


class PoolingParams(Struct, omit_defaults=True, kw_only=True, tag="pooling"):
    """The parameters of a request that ends when its prompt is computed. The constructor validates them.

    Raises:
        ValidationError: a value is out of its range; `parameter` names the field.
    """

    task: str | None = None
    """For example "embed" or "classify"; None: the model's own."""
    use_activation: bool | None = None
    """Normalize a vector, or turn scores into probabilities; None: as the model does."""
    dimensions: int | None = None
    """The length of a vector; None: the model's."""
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    skip_reading_prefix_cache: bool | None = None
    extra_kwargs: dict[str, Any] | None = None
    second_text: int = 0
    """Where the second text of a pair begins, in tokens; 0: there is no second text. Set by the frontend."""
    pool_from: int = 0
    """The first token that counts in the output. Set by the frontend."""

    def __post_init__(self) -> None:
        if self.dimensions is not None:
            self.dimensions = read.whole_number("dimensions", self.dimensions, 1)
        for name in ("use_activation", "skip_reading_prefix_cache"):
            if (value := getattr(self, name)) is not None:
                setattr(self, name, read.truth(name, value))
        if self.step_tag_id is not None:
            self.step_tag_id = read.whole_number("step_tag_id", self.step_tag_id, 0)
        if self.returned_token_ids is not None:
            self.returned_token_ids = read.token_ids("returned_token_ids", self.returned_token_ids)
        if self.extra_kwargs is not None:
            self.extra_kwargs = read.small_data("extra_kwargs", self.extra_kwargs)
        for name in ("second_text", "pool_from"):
            setattr(self, name, read.whole_number(name, getattr(self, name), 0))
