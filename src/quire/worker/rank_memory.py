"""What one rank holds of a model that several ranks split. Knows shapes. Loads torch only to construct models, without weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.config.engine import ModelSpec
from quire.errors import Unsupported
from quire.models.registry import choose_impl
from quire.parallel.ranks import LoneRank, split_among

if TYPE_CHECKING:
    from quire.models.base import CausalLM


def construct_part(spec: ModelSpec, size: int) -> CausalLM:
    """Rank 0's part of a native model on "meta"; the whole model, if `size` is 1, or ranks do not split it.

    Raises:
        Unsupported: the model has no native class, so its layers cannot be split.
    """
    size = size if spec.is_split else 1
    impl, reason = choose_impl(spec.architecture, spec.hf_config, spec.options.model_impl)
    if size > 1 and impl != "native":
        raise Unsupported(
            f"tensor_parallel_size={size} for {spec.architecture}, which runs as {impl} ({reason})",
            "use 1",
        )
    from quire.models.construction import construct

    with split_among(LoneRank(0, size) if size > 1 else None):
        return construct(spec)


def part_of_weights(spec: ModelSpec, size: int) -> float:
    """The part of a model's weights that one of `size` ranks has: of the numbers, in whatever format they are stored."""
    if size == 1 or not spec.is_split:
        return 1.0
    own, whole = (
        sum(parameter.numel() for parameter in construct_part(spec, ranks).parameters())
        for ranks in (size, 1)
    )
    return own / whole
