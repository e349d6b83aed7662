"""Which drafter each method of `speculative_config` builds.

Knows every drafter. Does not know how they guess.
"""

from __future__ import annotations

from collections.abc import Callable

from quire.config.engine import Resolved
from quire.config.serialize import by_name
from quire.config.speculation import SpeculativeOptions
from quire.errors import ConfigError
from quire.features.speculation.chain import Chain
from quire.features.speculation.drafter import Drafter
from quire.features.speculation.guarded import GuardedDrafter
from quire.features.speculation.ngram import NgramDrafter
from quire.features.speculation.suffix import SuffixDrafter
from quire.worker.build import WorkerParts

Builder = Callable[[WorkerParts, Resolved, SpeculativeOptions], Drafter]


def build_drafter(parts: WorkerParts, resolved: Resolved, options: SpeculativeOptions) -> Drafter:
    """The drafter of `method`; several methods, with commas between them, build a chain."""
    drafters = [BUILDERS[method](parts, resolved, options) for method in options.methods]
    drafter = drafters[0] if len(drafters) == 1 else Chain(drafters)
    return GuardedDrafter(drafter, parts.rows)


def _ngram(parts: WorkerParts, resolved: Resolved, options: SpeculativeOptions) -> Drafter:
    return NgramDrafter(*options.lookup)


def _suffix(parts: WorkerParts, resolved: Resolved, options: SpeculativeOptions) -> Drafter:
    return SuffixDrafter(
        options.suffix_decoding_max_tree_depth,
        options.suffix_decoding_max_cached_requests,
        options.suffix_decoding_max_spec_factor,
        options.suffix_decoding_min_token_prob,
    )


def _custom(parts: WorkerParts, resolved: Resolved, options: SpeculativeOptions) -> Drafter:
    """Raises ConfigError: the class cannot be imported, or is no class of drafters."""
    module, _, name = str(options.model).replace(":", ".").rpartition(".")
    kind = by_name(f"{module}:{name}")
    drafter = kind(options)
    if not isinstance(drafter, Drafter):
        raise ConfigError(
            f"speculative_config.model={options.model}: custom_class needs a class derived from"
            " quire.features.speculation.drafter.Drafter"
        )
    return drafter


BUILDERS: dict[str, Builder] = {"ngram": _ngram, "suffix": _suffix, "custom_class": _custom}
