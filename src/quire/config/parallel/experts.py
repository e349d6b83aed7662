"""How ranks share the experts of a mixture: the keys of `eplb_config`, and what contradicts them.

Knows options and the sizes of config.json. Does not know where an expert is (`parallel/expert_placement.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from quire.config.model_sizes import model_size
from quire.config.number_types import AtLeast0, AtLeast1, in_words
from quire.config.parallel.parallel_config import ParallelConfig
from quire.errors import ConfigError
from quire.logging import get_logger

log = get_logger(__name__)

KEY = "eplb_config"
NO_EFFECT = {
    "use_async": "experts move between two steps, which takes milliseconds",
    "communicator": "weights are exchanged as the parts of layers are",
    "enable_migration_batching": "all experts of a layer move at once",
}
"""Key -> why it is accepted without effect."""


class EplbOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of `eplb_config`: every `step_interval` steps, experts move by the tokens of the last `window_size` of these steps."""

    window_size: AtLeast1 = 1000
    step_interval: AtLeast1 = 3000
    num_redundant_experts: AtLeast0 = 0
    log_balancedness: bool = False
    log_balancedness_interval: AtLeast1 = 1
    policy: str = "default"


def eplb_options(config: ParallelConfig) -> EplbOptions | None:
    """Parse `eplb_config`; None: experts stay where they are.

    Raises:
        ConfigError: an unknown key, an invalid value, or options that contradict each other.
    """
    keys = {name.replace("-", "_"): value for name, value in config.eplb_config.items()}
    for name in [name for name in keys if name in NO_EFFECT]:
        log.info("%s.%s=%s has no effect: %s", KEY, name, keys.pop(name), NO_EFFECT[name])
    try:
        options = msgspec.convert(keys, EplbOptions, strict=False)
    except msgspec.ValidationError as why:
        raise ConfigError(f"{KEY}: {in_words(why).replace('$.', '')}") from None
    if options.policy != "default":
        raise ConfigError(f"{KEY}.policy={options.policy!r}: choose default")
    if not config.enable_eplb:
        if options.num_redundant_experts:
            raise ConfigError(
                f"{KEY}.num_redundant_experts={options.num_redundant_experts} without enable_eplb: add --enable-eplb, or leave"
                " it out"
            )
        return None
    if not config.enable_expert_parallel:
        raise ConfigError(
            "enable_eplb moves whole experts between ranks, but enable_expert_parallel is off: add --enable-expert-parallel"
        )
    if config.tensor_parallel_size == 1:
        raise ConfigError(
            "enable_eplb with tensor_parallel_size=1: one rank has all experts; use --tensor-parallel-size 2 or more, or leave"
            " --enable-eplb out"
        )
    return options


def check_experts(config: ParallelConfig, hf_config: Mapping[str, Any]) -> None:
    """Refuse what the model's experts do not allow, and warn of options without effect.

    Raises:
        ConfigError: the model has no experts to move.
    """
    if not config.enable_expert_parallel:
        return
    eplb, experts = eplb_options(config), model_size(hf_config, "num_experts")
    if eplb is not None and not experts:
        raise ConfigError("enable_eplb: this model has no experts; leave --enable-eplb out")
    why = "this model has no experts" if not experts else "one rank has all experts"
    if not experts or config.tensor_parallel_size == config.data_parallel_size == 1:
        log.warning("enable_expert_parallel has no effect: %s", why)
