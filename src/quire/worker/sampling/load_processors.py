"""Loads users' logits processors from names and classes.

Knows how to find a class: it is given, named as `module:Class` (or `module.Class`), or provided by an installed package
under an entry point. Does not know what the class does. It accepts two kinds: `logits_processors.Processor`, and
classes that are written for vLLM (`vllm_processors.py`, and `vllm_slot_processors.py` for its second interface).
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from quire import env
from quire.config.serialize import by_name
from quire.errors import ConfigError
from quire.logging import get_logger
from quire.worker.request_rows import RequestRows
from quire.worker.sampling.logits_processors import Processor
from quire.worker.sampling.vllm_processors import adapt_processor, config_of, is_vllm_processor
from quire.worker.sampling.vllm_slot_processors import SlotProcessorAdapter, is_slot_processor

log = get_logger(__name__)

GROUP = "quire.logits_processors"
FOREIGN_GROUP = "vllm.logits_processors"
"""Used only if QUIRE_PLUGINS names them, as with all vLLM plugins (`plugins.py`)."""


def load_processors(
    names: Sequence[str | type], config: Any = None, device: torch.device | str = "cpu",
    rows: RequestRows | None = None, vocab_size: int = 0,
) -> list[Processor]:  # fmt: skip
    """Processors of installed packages, then the processors that `names` lists, in their order.

    Args:
        names: classes, or their names.
        config: a Resolved; processors for vLLM get a small part of it.
        rows: of the worker, whose tokens processors of vLLM's second interface read.

    Raises:
        ConfigError: a name cannot be imported, a class is of neither kind, or its constructor fails.
    """
    named = (by_name(n, "logits_processors") if isinstance(n, str) else n for n in names)
    found: list[Processor] = []
    for kind in (*_installed(), *named):
        if rows is not None and isinstance(kind, type) and is_slot_processor(kind):
            make = partial(SlotProcessorAdapter, kind, config_of(config), rows, vocab_size)
            found.append(_created(kind, make))
        else:
            found.append(_created(kind, partial(_create_processor, kind, config, device)))
    return found


def _installed() -> list[Any]:
    text = env.get("PLUGINS")
    allowed = None if text is None else {name.strip() for name in text.split(",")}
    points = list(importlib.metadata.entry_points(group=GROUP))
    if allowed is not None:
        points += importlib.metadata.entry_points(group=FOREIGN_GROUP)
        points = [point for point in points if point.name in allowed]
    kinds = []
    for point in points:
        try:
            kinds.append(point.load())
        except Exception as error:
            raise ConfigError(
                f"the logits processor {point.value} of an installed package cannot be imported:"
                f" {type(error).__name__}: {error}; uninstall it, or leave {point.name} out of QUIRE_PLUGINS"
            ) from error
        log.info("loaded logits processor %s (%s) of an installed package", point.name, point.value)
    return kinds


def _created(kind: Any, make: Callable[[], Processor]) -> Processor:
    try:
        return make()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"logits_processors: {kind.__name__} cannot be constructed: {type(error).__name__}: {error}"
        ) from error


def _create_processor(kind: Any, config: Any, device: torch.device | str) -> Processor:
    if isinstance(kind, Processor):
        return kind
    if isinstance(kind, type) and issubclass(kind, Processor):
        return kind()
    if isinstance(kind, type) and is_vllm_processor(kind):
        return adapt_processor(kind, config, device)
    raise ConfigError(
        f"logits_processors: {kind!r} is not a logits processor: it must be a class with apply, update_state and"
        " is_argmax_invariant, or with apply and add_request, or a subclass of"
        " quire.worker.sampling.logits_processors.Processor"
    )
