"""A toy device: rows, a memory of blocks, and a next token that depends on the last seven tokens and the adapter.

A stateful device also has a recurrent state for each row: a hash of all tokens so far.

It runs plans in order and as late as possible, and compares every read of its memory with the expected value. It shares
no code with the worker.
"""

from __future__ import annotations

import random
import sys
from collections import defaultdict, deque
from dataclasses import dataclass, field

import msgspec

from quire.executor.messages import decode_up, encode
from quire.kvcache.specs import CacheGroup, CrossAttentionSpec, WindowSpec
from quire.protocol.plan import EnteredRow, StepPlan, StepResult
from quire.protocol.pooling_params import PoolingParams
from quire.protocol.tensor_data import TensorData
from quire.worker.state_hook import StateHook

VOCAB = 97
POISON = "poison"


def next_token(history: list[int], adapter: str | None) -> int:
    value = 17 if adapter is None else 31 * len(adapter) + ord(adapter[0])
    for token in history[-7:]:
        value = (value * 131 + token + 7) % 1_000_003
    return value % VOCAB


@dataclass
class ToyRow:
    id: str
    kin: tuple  # what KV depends on besides the tokens: adapter and salt
    tokens: list[int]
    num_computed_tokens: int
    blocks: list[list[int]]
    entered: int  # step
    drafts: list[int] = field(default_factory=list)
    spoilt: bool = False
    pools: bool = False  # it draws no tokens; its output is a tensor
    states: int = 0  # of the encoder, whose KV its first step writes
    states_written: bool = False


def histories(sequence: list[int], value: int = 1) -> list[int]:
    """For each position, a hash of all tokens up to it: KV depends on what comes before."""
    out = []
    for token in sequence:
        value = (value * 1_000_003 + token + 1) % 2_305_843_009_213_693_951
        out.append(value)
    return out


def pooled(prompt: list[int]) -> TensorData:
    """The output of a request that generates nothing."""
    return TensorData("int64", [1], histories(prompt)[-1].to_bytes(8, sys.byteorder))


class StepFailed(Exception):
    """The device could not run a step at all."""


class ToyStates:
    """The recurrent states of rows, and their checkpoints, by place."""

    def __init__(self) -> None:
        self.rows: dict[int, object] = defaultdict(lambda: 1)
        self.checkpoints: dict[int, object] = {}
        self.saved_in: dict[int, int] = {}
        self.loads = 0

    def clear(self, row: int) -> None:
        self.rows[row] = 1

    def load(self, row: int, slot: int) -> None:
        self.loads += 1
        self.rows[row] = self.checkpoints[slot]

    def save(self, row: int, slot: int) -> None:
        self.checkpoints[slot] = self.rows[row]

    def lose(self) -> None:
        """The memory is freed and allocated again."""
        self.rows.update(dict.fromkeys(self.rows, "lost"))
        self.checkpoints = dict.fromkeys(self.checkpoints, "lost")


class ToyDevice:
    """An Executor. `kin`: what the KV of a request depends on, by id; `faults`: ids whose row fails."""

    recoverable = (StepFailed,)

    def __init__(
        self,
        groups: list[CacheGroup],
        num_blocks: int,
        block_size: int,
        drafts: int,
        rng: random.Random,
    ):
        self.groups, self.bs, self.drafts, self.rng = groups, block_size, drafts, rng
        self.memory: list = [None] * (num_blocks * block_size)
        self.rows: dict[int, ToyRow] = {}
        self.queue: deque[bytes] = deque()
        self.done: dict[int, StepResult | StepFailed] = {}
        self.kin: dict[str, tuple] = {}
        self.faults: dict[str, int] = {}  # id -> the step work that fails: counts down
        self.failing_steps = 0.0  # probability
        self.failed_steps: set[int] = set()
        self.spoilt_by_step: dict[int, set[str]] = {}
        self.entered_at: dict[str, int] = {}
        self.reads = self.launched = 0
        self.right = 0.6  # probability that a draft token is right
        self.adding = (
            0.0  # probability of tokens that follow a draw without a draw; only at depth 1
        )
        self.num_added = 0
        self.fate = random.Random(0)
        self.states: ToyStates | None = None
        self.hook: StateHook | None = None
        self.drew: dict[int, list[tuple[int, ToyRow]]] = {}  # by step: item, row

    def launch(self, plan: StepPlan):
        self.queue.append(msgspec.msgpack.encode(plan))  # a process boundary
        self.launched = plan.step
        return _Late(self, plan.step)

    def call(self, name, *args):
        if name not in ("sleep_worker", "wake_up_worker"):
            raise NotImplementedError
        return [None]

    def close(self):
        pass

    def result(self, step: int) -> StepResult:
        while step not in self.done:
            self._run(msgspec.msgpack.decode(self.queue.popleft(), type=StepPlan))
        done = self.done.pop(step)
        if isinstance(done, StepFailed):
            self.failed_steps.add(step)
            raise done
        self._add_tokens(done)
        return done

    def _add_tokens(self, result: StepResult) -> None:
        """Report tokens that follow a draw. At depth 1 no later step is queued."""
        for index, row in self.drew.pop(result.step):
            if row.spoilt or self.fate.random() >= self.adding:
                continue
            known = len(row.tokens)
            for _ in range(self.fate.choice([1, 1, 2, 3, 9])):
                row.tokens.append(next_token(row.tokens, row.kin[0]))
            row.drafts = []  # draft tokens do not continue them
            result.added_tokens[index] = row.tokens[known:]
            self.num_added += len(row.tokens) - known

    def run_all(self) -> None:
        while self.queue:
            self._run(msgspec.msgpack.decode(self.queue.popleft(), type=StepPlan))

    def add_states(self) -> None:
        self.states = ToyStates()
        self.hook = StateHook(self.states)

    # -- one step -------------------------------------------------------------------------------
    def _run(self, plan: StepPlan) -> None:
        for row in plan.freed_rows:
            assert self.rows.pop(row, None) is not None, f"row {row} left twice, or was never there"
        for new in plan.entered:
            self._enter(new, plan.step)
        fails = self.rng.random() < self.failing_steps
        if self.hook is not None:
            fails |= not self._prepare_states(plan)
        if "loading" in plan.extras:
            self._load(msgspec.msgpack.decode(plan.extras["loading"]), fails)
        work = []
        for item in plan.work:
            row = self.rows[item.row]
            for column, new_blocks in zip(row.blocks, item.new_blocks, strict=False):
                column += new_blocks
            sequence = row.tokens + row.drafts[: item.drafts]
            start, end = row.num_computed_tokens, row.num_computed_tokens + item.num_tokens
            assert end - item.drafts <= len(row.tokens), f"row {item.row}: no such tokens"
            end = min(end, len(sequence))  # the plan allows for more draft tokens
            assert start < end, f"row {item.row}: no such tokens"
            row.spoilt |= self._fails(row) or fails
            if self.states is not None:
                self._advance_state(item.row, sequence, start, end)
            self._write(row, sequence, start, end)  # all rows write before any reads
            work.append((item, row, sequence, start, end))
        if self.hook is not None and not fails:
            self.hook.after(plan)
        tokens, errors, drew = [], {}, []
        for index, (item, row, sequence, start, end) in enumerate(work):
            row.spoilt |= self._read(row, sequence, start, end)
            if row.spoilt:
                errors[index] = "spoilt"
                self.spoilt_by_step.setdefault(plan.step, set()).add(row.id)
            drafts = max(end - len(row.tokens), 0)
            tokens.append(self._decide(item, row, sequence, end, drafts))
            if self.states is not None and drafts:
                self._take_state_back(item.row)
            if tokens[-1]:
                drew.append((index, row))
        self.drew[plan.step] = drew
        result = StepResult(plan.step, tokens, errors=errors)
        if "loading" in plan.extras:
            result.extras["loading"] = msgspec.msgpack.encode(plan.step)
        for index, (item, row, sequence, _, end) in enumerate(work):
            assert not (row.pools and item.samples), "a row that draws no tokens samples"
            if row.pools and end == len(sequence):
                result.tensors[index] = pooled(sequence)
        self.done[plan.step] = StepFailed() if fails else decode_up(encode(result))

    def _load(self, writes: list, fails: bool) -> None:
        """Write contents that were computed before."""
        for block, content in writes:
            assert block, "the null block is loaded"
            for offset, (group, token, kin, history) in enumerate(content):
                value = POISON if fails else (group, token, tuple(kin), history)
                self.memory[block * self.bs + offset] = value

    def _prepare_states(self, plan: StepPlan) -> bool:
        """Whether every checkpoint that the plan loads was saved."""
        for new in plan.entered:
            self.hook.enter(new)
        try:
            self.hook.before(plan, None)
        except RuntimeError:
            return False
        return True

    def _advance_state(self, number: int, sequence: list[int], start: int, end: int) -> None:
        """Add the tokens to the row's state; it must include all tokens before them, and no others."""
        row, found = self.rows[number], self.states.rows[number]
        row.spoilt |= found == POISON
        if not row.spoilt:
            expected = 1 if start == 0 else (row.kin, histories(sequence[:start])[-1])
            assert found == expected, f"{row.id} continues from a wrong state"
        history = histories(sequence[:end])[-1]
        self.states.rows[number] = POISON if row.spoilt else (row.kin, history)

    def _take_state_back(self, number: int) -> None:
        """The row's state again includes only the tokens that are right."""
        row = self.rows[number]
        history = histories(row.tokens[: row.num_computed_tokens])[-1]
        self.states.rows[number] = POISON if row.spoilt else (row.kin, history)

    def _enter(self, new: EnteredRow, step: int) -> None:
        assert new.row not in self.rows, f"row {new.row} is taken"
        blocks = [list(column) for column in new.blocks]
        kin = self.kin[new.id]
        assert new.adapter == kin[0]
        self.rows[new.row] = ToyRow(
            new.id, kin, list(new.tokens), new.num_computed_tokens, blocks, step,
            pools=isinstance(new.params, PoolingParams), states=new.num_encoder_tokens,
        )  # fmt: skip
        self.entered_at.setdefault(new.id, step)

    def _fails(self, row: ToyRow) -> bool:
        if row.id not in self.faults:
            return False
        self.faults[row.id] -= 1
        return self.faults[row.id] < 0

    def _write(self, row: ToyRow, sequence: list[int], start: int, end: int) -> None:
        history = histories(sequence)
        for g, group in enumerate(self.groups):
            if isinstance(group.spec, CrossAttentionSpec):
                if not row.states_written:
                    for position in range(row.states):
                        at = self._at(row, g, position)
                        assert at >= self.bs, "a state is written to the null block"
                        self.memory[at] = (g, row.id, position)
                continue
            for position in range(start, end):
                at = self._at(row, g, position)
                assert at >= self.bs, f"group {g}: position {position} is written to the null block"
                self.memory[at] = (
                    POISON if row.spoilt else (g, sequence[position], row.kin, history[position])
                )
        row.states_written = True

    def _read(self, row: ToyRow, sequence: list[int], start: int, end: int) -> bool:
        """Check all KV that the new positions read; True if some of it is spoilt."""
        spoilt = False
        history = histories(sequence)
        for g, group in enumerate(self.groups):
            if isinstance(group.spec, CrossAttentionSpec):
                assert len(row.blocks[g]) == -(-row.states // self.bs)
                for position in range(row.states):
                    found = self.memory[self._at(row, g, position)]
                    assert found == (g, row.id, position), f"{row.id} reads someone else's states"
                continue
            first = 0
            if isinstance(group.spec, WindowSpec):
                first = max(0, start - group.spec.window + 1)
            for position in range(first, end):
                self.reads += 1
                found = self.memory[self._at(row, g, position)]
                if found == POISON:
                    spoilt = True
                elif not row.spoilt:
                    assert found == (g, sequence[position], row.kin, history[position]), (
                        f"{row.id} reads someone else's KV"
                    )
        return spoilt

    def _decide(self, item, row: ToyRow, sequence: list[int], end: int, drafts: int) -> list[int]:
        if not item.samples or end < len(row.tokens):
            row.num_computed_tokens = end
            return []
        base = end - 1 - drafts
        decided = []
        for i in range(drafts + 1):
            decided.append(next_token(sequence[: base + i + 1], row.kin[0]))
            if i < drafts and decided[-1] != sequence[base + i + 1]:
                break
        row.tokens = row.tokens[: base + 1] + decided + row.tokens[base + 1 + len(decided) :]
        row.num_computed_tokens = end - (drafts + 1 - len(decided))
        history, row.drafts = list(row.tokens), []
        for _ in range(
            self.rng.choice([self.drafts, self.drafts, self.rng.randint(0, self.drafts)])
        ):
            right = self.rng.random() < self.right
            row.drafts.append(
                next_token(history, row.kin[0]) if right else self.rng.randrange(VOCAB)
            )
            history.append(row.drafts[-1])
        return decided

    def _at(self, row: ToyRow, group: int, position: int) -> int:
        return row.blocks[group][position // self.bs] * self.bs + position % self.bs


class _Late:
    """Runs nothing until its result is requested."""

    def __init__(self, device: ToyDevice, step: int):
        self.device, self.step = device, step

    def result(self) -> StepResult:
        return self.device.result(self.step)
