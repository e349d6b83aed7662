"""How the answers of several engines to one call become one answer.

Knows the named functions by what their answers mean (`rpc.py`, `sleep.py`, `lora.py`, `observe/inspector.py`). A function
that is not in the table does the same in every engine, and the first answer stands for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import msgspec

from quire.protocol.output import EngineReady, EngineStats

Answers = Sequence[Any]


def joined(answers: Answers) -> list[Any]:
    return list(chain.from_iterable(answers))


def total(answers: Answers) -> int:
    return sum(answers)


def united(answers: Answers) -> list[Any]:
    return sorted(set(chain.from_iterable(answers)))


def first_text(answers: Answers) -> Any:
    """The reason of the first engine that has one."""
    return next((answer for answer in answers if answer is not None), None)


def of_all(answers: Answers) -> Any:
    """The first answer, if every engine has one."""
    return None if None in answers else answers[0]


def all_true(answers: Answers) -> bool:
    return all(answers)


def any_true(answers: Answers) -> bool:
    return any(answers)


MERGED: dict[str, Callable[[Answers], Any]] = {
    "collective_rpc": joined,
    "requests": joined,
    "abort_client": total,
    "hold": total,
    "wake_up": united,
    "release_kv_cache": first_text,
    "find_lora": of_all,
    **dict.fromkeys(("reset_prefix_cache", "drained", "pause", "resume", "sleep", "pin_lora"), all_true),
    **dict.fromkeys(("is_paused", "is_sleeping", "unload_lora"), any_true),
    "stats": lambda answers: msgspec.structs.asdict(
        merged_stats([EngineStats(**answer) for answer in answers])
    ),
}  # fmt: skip
"""Function -> its answer, from the answers of all engines in their order."""

ONCE = frozenset({"count_ended"})
"""Functions that only one engine must run, any of them."""


def merge(name: str, answers: Answers) -> Any:
    return MERGED[name](answers) if name in MERGED else answers[0]


def merged_stats(parts: Sequence[EngineStats]) -> EngineStats:
    """The sum of several engines; of the KV cache the share of all blocks."""
    if len(parts) == 1:
        return parts[0]
    blocks = sum(part.num_blocks for part in parts)
    used = sum(part.kv_usage * part.num_blocks for part in parts)
    added = ("running", "waiting", "preemptions", "prefix_queries", "prefix_hits", "prompt_tokens",
             "generation_tokens", "steps", "deferred")  # fmt: skip
    return EngineStats(
        **{name: sum(getattr(part, name) for part in parts) for name in added},
        kv_usage=used / blocks if blocks else 0.0,
        num_blocks=blocks,
        block_size=parts[0].block_size,
        finished=_added([part.finished for part in parts]),
        histograms=_added_rows([part.histograms for part in parts]),
        state=next((part.state for part in parts if part.state != "awake"), "awake"),
        counts=_added([part.counts for part in parts]),
        labels=parts[0].labels,
    )


def merged_ready(parts: Sequence[EngineReady]) -> EngineReady:
    """What every one of several engines can do; the start-up times are the slowest engine's."""
    slowest = max(parts, key=lambda part: sum(seconds for _, seconds in part.startup))
    least = ("max_model_len", "num_blocks", "num_tokens", "max_num_seqs")
    same_bits = all(part.batch_invariant for part in parts)
    return msgspec.structs.replace(
        slowest,
        batch_invariant=same_bits,
        **{name: min(getattr(part, name) for part in parts) for name in least},
    )


def _added(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    names = dict.fromkeys(chain.from_iterable(parts))
    return {name: sum(part.get(name, 0) for part in parts) for name in names}


def _added_rows(parts: Sequence[dict[str, list[float]]]) -> dict[str, list[float]]:
    names = dict.fromkeys(chain.from_iterable(parts))
    return {
        name: [sum(column) for column in zip(*(part[name] for part in parts if name in part), strict=True)]
        for name in names
    }  # fmt: skip
