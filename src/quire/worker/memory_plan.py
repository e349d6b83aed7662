"""The memory plan: how memory is divided, calculated before anything is loaded.

Knows the bytes of weights, of a step's activations, of a token's KV. Does not know tensors or devices. If the
plan fits, it says how many blocks there are; if not, the error says which number to change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from quire.config.engine import ModelSpec, Resolved
from quire.config.model_sizes import model_size
from quire.errors import NotEnoughMemory
from quire.kvcache.layout import CacheLayout, layout
from quire.kvcache.specs import CacheSpec
from quire.logging import get_logger
from quire.protocol.tensor_data import ITEMSIZE

logger = get_logger(__name__)
GIB = 1 << 30
CHECKPOINT_SHARE = 8  # checkpoints get one part of this number of parts of the cache
FREE_BLOCKS = 1 << 16  # of a cache whose blocks cost no memory


class MemoryLine(NamedTuple):
    """Memory that a feature takes from the KV cache.

    Attributes:
        name: plural, as the plan's table and errors say it.
        about: how it is counted, after the number.
        lower: the options that make it smaller, joined by "or".
        where: memory of the host is counted where it is the device's, too: on a CPU.
    """

    name: str
    num_bytes: int
    about: str = ""
    lower: str = ""
    where: Literal["device", "host"] = "device"


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """The size of each part in bytes, and the limits that follow from it."""

    total: int
    available: int
    share: float  # gpu_memory_utilization
    weights: int
    activations: int
    layout: CacheLayout
    num_blocks: int  # usable by requests; the null block is additional
    max_model_len: int
    max_num_seqs: int
    max_step_tokens: int
    state_bytes: int = 0  # of one request's recurrent states
    num_checkpoints: int = 0  # of these, for prefix caching
    num_drafts: int = 0  # and of these, for each row: states after its draft tokens
    lines: Sequence[MemoryLine] = ()  # of features

    @property
    def num_line_bytes(self) -> int:
        return sum(line.num_bytes for line in self.lines)

    @property
    def states(self) -> int:
        """Bytes of the recurrent states: of each row and its draft tokens, the null row and the checkpoints."""
        rows = self.max_num_seqs * (1 + self.num_drafts)
        return (rows + 1 + self.num_checkpoints) * self.state_bytes

    @property
    def kv(self) -> int:
        return (self.num_blocks + 1) * self.layout.bytes_per_block

    @property
    def max_requests(self) -> int:
        """How many requests of max_model_len fit at once."""
        return self.num_blocks // self.layout.blocks_for(self.max_model_len, self.max_step_tokens)

    @property
    def num_tokens(self) -> int:
        """How many tokens fit, for requests of max_model_len."""
        return self.layout.tokens_in(self.num_blocks, self.max_model_len, self.max_step_tokens)

    def table(self) -> list[tuple[str, str]]:
        kv_of = self.layout.groups[0]
        rows = [
            ("memory", f"{size(self.available)} available of {size(self.total)}"),
            ("used at most", f"{size(int(self.available * self.share))} ({self.share:.0%})"),
            ("weights", size(self.weights)),
            ("activations", f"{size(self.activations)} for steps of {self.max_step_tokens} tokens"),
            (
                "KV cache",
                f"{size(self.kv)} = {self.num_blocks} blocks of {self.layout.block_size},"
                f" in {kv_of.spec.dtype}"
                if kv_of.layers
                else "none: no layer keeps keys and values",
            ),
            ("tokens that fit", f"{self.num_tokens:,}"),
            (
                "requests that fit",
                f"{self.max_requests} of max_model_len={self.max_model_len}"
                f" (max_num_seqs={self.max_num_seqs})",
            ),
        ]
        if self.state_bytes:
            about = f"{size(self.states)} = {size(self.state_bytes)} for each of {self.max_num_seqs} + 1 rows and"
            about += f" {self.num_checkpoints} checkpoints"
            about += f", {self.num_drafts} for the draft tokens of a row" * bool(self.num_drafts)
            about += " (no prefix caching)" * (not self.num_checkpoints)
            rows.insert(4, ("recurrent states", about))
        rows[3:3] = [
            (line.name, f"{size(line.num_bytes)} {line.about}".rstrip())
            for line in self.lines
            if line.num_bytes
        ]
        return rows


def size(num_bytes: int) -> str:
    """1610612736 -> '1.50 GiB'"""
    for unit, name in ((GIB, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if abs(num_bytes) >= unit:
            return f"{num_bytes / unit:.2f} {name}"
    return f"{num_bytes} B"


def activation_bytes(spec: ModelSpec, max_num_seqs: int) -> int:
    """The peak of memory in a step: a few hidden states, the inner values of an MLP, and float32 logits twice."""
    config = spec.hf_config
    hidden = model_size(config, "hidden_size", 1024)
    inner = model_size(config, "intermediate_size", 4 * hidden)
    item = ITEMSIZE[spec.dtype]
    step = spec.max_step_tokens * (8 * hidden + 3 * inner) * item
    logits = max_num_seqs * model_size(config, "vocab_size", 32_000) * 4 * 2
    return int(step + logits)


def make_plan(
    resolved: Resolved,
    weights: int,
    total: int,
    available: int,
    specs: Sequence[CacheSpec],
    others: Sequence[ModelSpec] = (),
    state_bytes: int = 0,
    lines: Sequence[MemoryLine] = (),
    own: range | None = None,
) -> MemoryPlan:
    """Choose the number of blocks, and with `auto` also the longest context.

    `weights`, `specs`, `state_bytes` (of one request): of all models. `own`: which of the specs are of this rank's stage; None: all. `others`: the models beside the main one; one model computes at a time. `lines`: of features.

    Raises:
        NotEnoughMemory: weights and activations leave too little for one request of max_model_len, or for the states of
            max_num_seqs requests.
    """
    cache = resolved.config.cache
    lines = [line for line in lines if line.where == "device" or resolved.device == "cpu"]
    kv_layout = layout(specs, resolved.block_size, resolved.max_model_len)
    if own is not None and len(own) < len(specs):
        kv_layout = kv_layout.of_layers(own)
    if (keepers := resolved.config.parallel.decode_context_parallel_size) > 1:
        kv_layout = kv_layout.divided(keepers)
    plan = MemoryPlan(
        total=total,
        available=available,
        share=cache.gpu_memory_utilization,
        weights=weights,
        activations=max(
            activation_bytes(spec, resolved.max_num_seqs) for spec in (resolved.spec, *others)
        ),
        layout=kv_layout,
        num_blocks=0,
        max_model_len=resolved.max_model_len,
        max_num_seqs=resolved.max_num_seqs,
        max_step_tokens=min(resolved.max_num_batched_tokens, resolved.max_model_len),
        state_bytes=state_bytes,
        num_drafts=resolved.num_drafts if state_bytes else 0,
        lines=lines,
    )
    if cache.num_gpu_blocks_override is not None:
        kv = cache.num_gpu_blocks_override * kv_layout.bytes_per_block
        plan = _with_checkpoints(plan, max(kv // CHECKPOINT_SHARE, state_bytes), resolved)
        return _with_blocks(plan, cache.num_gpu_blocks_override, resolved)
    room = cache.kv_cache_memory_bytes
    if room is None:
        room = int(available * plan.share) - weights - plan.activations - plan.num_line_bytes
    if state_bytes:
        plan = _with_states(plan, room, resolved)
        left = room - plan.states
        share = min(left // CHECKPOINT_SHARE, left - _one_request(plan, resolved))
        plan = _with_checkpoints(plan, share, resolved)
        room -= plan.states
    # Requests that run need no more blocks than max_num_seqs of full length. More hold prefixes of others, if the user wants them.
    blocks_per_request = kv_layout.blocks_for(plan.max_model_len, plan.max_step_tokens)
    blocks = plan.max_num_seqs * blocks_per_request
    if kv_layout.bytes_per_block:
        fits = room // kv_layout.bytes_per_block - 1
        requested = cache.kv_cache_memory_bytes
        keeps = resolved.prefix_caching and requested is not None and requested <= _most(plan)
        blocks = fits if keeps else min(blocks, fits)
    else:
        blocks = min(blocks, max(FREE_BLOCKS, blocks_per_request))
    plan = _with_blocks(plan, blocks, resolved)
    if cache.kv_cache_memory_bytes is not None:
        _check_requested(plan, cache.kv_cache_memory_bytes)
    return plan


def _with_states(plan: MemoryPlan, room: int, resolved: Resolved) -> MemoryPlan:
    """Check that `room` bytes hold the states of max_num_seqs requests, and the KV cache of one request.

    A max_num_seqs that the user left open is lowered until the states take at most half of the room.

    Raises:
        NotEnoughMemory: they do not fit; the message names the largest max_num_seqs that does.
    """
    rows, need = plan.max_num_seqs, _one_request(plan, resolved)
    each = 1 + plan.num_drafts  # states of a row
    fits = ((room - need) // plan.state_bytes - 1) // each
    if resolved.config.scheduler.max_num_seqs is None and fits >= 1:
        rows = min(rows, fits, max((room // 2 // plan.state_bytes - 1) // each, 1))
        if rows < plan.max_num_seqs:
            logger.info(
                "max_num_seqs is %d, not %d: the recurrent states of a request take %s",
                rows, plan.max_num_seqs, size(each * plan.state_bytes),
            )  # fmt: skip
    if rows > fits and (fits >= 1 or need <= room):
        remedy = "Use a smaller model, or raise gpu_memory_utilization"
        raise NotEnoughMemory(
            f"Not enough memory: the recurrent states of max_num_seqs={rows} requests need"
            f" {size((rows * each + 1) * plan.state_bytes)} beside {size(need)} for the KV cache of one request, and"
            f" {size(room)} is left. {f'Set max_num_seqs={fits} or less' if fits >= 1 else remedy}."
        )
    return replace(plan, max_num_seqs=rows)


def _one_request(plan: MemoryPlan, resolved: Resolved) -> int:
    """Bytes of the KV cache of one request of max_model_len; with `auto`, of the shortest one."""
    blocks = 1
    if not resolved.auto_max_model_len:
        blocks = plan.layout.blocks_for(plan.max_model_len, plan.max_step_tokens)
    return (blocks + 1) * plan.layout.bytes_per_block


def _with_checkpoints(plan: MemoryPlan, share: int, resolved: Resolved) -> MemoryPlan:
    """Use `share` bytes for checkpoints of the states, if prefixes are cached: no more than the blocks can name."""
    if not (plan.state_bytes and resolved.caches_states):
        return plan
    blocks = plan.max_num_seqs * plan.layout.blocks_for(plan.max_model_len, plan.max_step_tokens)
    most = blocks * resolved.block_size // resolved.checkpoint_boundary
    return replace(plan, num_checkpoints=max(min(share // plan.state_bytes, most), 0))


def _most(plan: MemoryPlan) -> int:
    """Bytes that the machine has for the KV cache and the states."""
    return plan.total - plan.weights - plan.activations - plan.num_line_bytes


def _check_requested(plan: MemoryPlan, requested: int) -> None:
    """Raises NotEnoughMemory: the machine cannot hold weights and a KV cache of kv_cache_memory_bytes."""
    most = _most(plan)
    if plan.kv + plan.states > most:
        raise NotEnoughMemory(
            f"kv_cache_memory_bytes={requested}: beside {size(plan.weights)} of weights and {size(plan.activations)} of"
            f" activations, a KV cache of {size(plan.kv + plan.states)} does not fit into the machine's {size(plan.total)}."
            f" Use at most {max(most, 0)}, or leave it out."
        )
    if requested > plan.total:
        logger.warning_once(
            "kv_cache_memory_bytes=%d is more than the machine's %s: the KV cache takes %s, which max_num_seqs=%d"
            " requests of max_model_len=%d can use",
            requested, size(plan.total), size(plan.kv + plan.states), plan.max_num_seqs, plan.max_model_len,
        )  # fmt: skip


def _with_blocks(plan: MemoryPlan, num_blocks: int, resolved: Resolved) -> MemoryPlan:
    kv_layout, block = plan.layout, plan.layout.block_size
    longest = plan.max_model_len
    if kv_layout.blocks_for(longest, plan.max_step_tokens) > num_blocks:
        longest = _longest(plan, num_blocks)
        forced = resolved.config.cache.num_gpu_blocks_override is not None
        if longest < block or (not resolved.auto_max_model_len and not forced):
            requested = resolved.config.cache.kv_cache_memory_bytes
            raise NotEnoughMemory(_explain(plan, num_blocks, longest, requested))
        if forced and not resolved.auto_max_model_len:
            # the scheduler refuses requests that cannot fit, with the numbers
            longest = plan.max_model_len
    return replace(plan, num_blocks=num_blocks, max_model_len=longest)


def _longest(plan: MemoryPlan, num_blocks: int) -> int:
    """The most tokens that one request may have, as a multiple of the block size."""
    low, high = 0, plan.max_model_len // plan.layout.block_size
    while low < high:
        middle = (low + high + 1) // 2
        fits = plan.layout.blocks_for(middle * plan.layout.block_size, plan.max_step_tokens)
        low, high = (middle, high) if fits <= num_blocks else (low, middle - 1)
    return low * plan.layout.block_size


def _explain(plan: MemoryPlan, num_blocks: int, longest: int, requested: int | None) -> str:
    need = plan.layout.blocks_for(plan.max_model_len, plan.max_step_tokens)
    cost = size((need + 1) * plan.layout.bytes_per_block)
    available = size(max(num_blocks + 1, 0) * plan.layout.bytes_per_block)
    sums = (
        f"{size(plan.available)} available x gpu_memory_utilization={plan.share:g}, less"
        f" {size(plan.weights)} of weights and {size(plan.activations)} of activations"
        + "".join(f" and {size(line.num_bytes)} of {line.name}" for line in plan.lines)
        if requested is None
        else f"kv_cache_memory_bytes={requested}"
    )
    if longest >= plan.layout.block_size:
        remedy = f"Set max_model_len={longest} or less, or max_model_len=auto"
    elif requested is not None:
        remedy = "Raise kv_cache_memory_bytes"
    elif plan.weights > plan.available * plan.share:
        share = "raise gpu_memory_utilization, or " * (plan.weights < plan.available)
        remedy = f"The weights alone do not fit: {share}use a smaller model or a smaller dtype"
    else:
        lower = "".join(f", {line.lower}" for line in plan.lines if line.lower)
        remedy = f"Lower max_num_batched_tokens{lower}, or raise gpu_memory_utilization"
    return (
        f"Not enough memory: one request of max_model_len={plan.max_model_len} needs {cost} of KV cache,"
        f" and {available} is left ({sums}). {remedy}."
    )
