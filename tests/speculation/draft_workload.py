"""Random workloads of a worker whose rows have draft tokens: every answer equals a worker's without them.

The model is a toy whose next token depends on the tokens before it, which it reads from a KV cache of its own, and on a
recurrent state. A draft token that stays after it was refused, is taken twice, or is read too early changes what follows.
`MUTATIONS` break one rule of the worker at a time; the workloads must notice each.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from worker.known_answers import KnownAnswers

from quire.engine.core import EngineCore
from quire.executor.inline import InlineExecutor
from quire.features.speculation.controller import SpeculationController
from quire.features.speculation.gate import SpeculationGate
from quire.features.speculation.hook import SpeculationHook
from quire.features.thinking.budget import ThinkingBudget
from quire.forward_context import KEPT_STATES, current_batch
from quire.kvcache.block_hash import Hasher
from quire.kvcache.block_pool import BlockPool
from quire.kvcache.manager import KVManager
from quire.kvcache.specs import CacheGroup, CacheSpec, StateSpec
from quire.layers.state import StateLayer
from quire.ops.recurrent import StateRows, decaying_sum
from quire.protocol.request import Abort, EngineRequest
from quire.protocol.sampling_params import SamplingParams, ThinkingMarkers
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.scheduler import Scheduler
from quire.worker.model_input import TokenModelInput
from quire.worker.request_rows import RequestRows
from quire.worker.row_states import RowStates
from quire.worker.sampling.logits_processors import Processor, ProcessorRows
from quire.worker.sampling.sampler import Sampler
from quire.worker.state_hook import StateHook
from quire.worker.state_rollback import StateRollback
from quire.worker.worker import Worker

VOCAB, HASHES, LONGEST = 29, 997, 72

SAMPLER, ROWS = "quire.worker.sampling.sampler", "quire.worker.request_rows"
BUILTIN, BATCH = "quire.worker.sampling.builtin_processors", "quire.worker.input_batch"
STEP, ROLLBACK = "quire.worker.sampling.sampled_step", "quire.worker.state_rollback"
PROCESSORS = "quire.worker.sampling.logits_processors"

# name -> the arguments of `broken` (tests/broken_rule.py)
MUTATIONS = {
    "a draft token stays after it was refused": (SAMPLER, "Sampler._verify", "not right_S[ANY]", "False"),
    "a place is off by one": (SAMPLER, "Sampler._verify", "lengths_S[ends] + 1", "lengths_S[ends]"),
    "a fault ends the tokens before it": (SAMPLER, "Sampler._verify", "ANY in faulty", "False"),
    "every place has the noise of the row's first": (
        SAMPLER, "Sampler._draw", 'keys(params_S["seed"], lengths_S)',
        'keys(params_S["seed"], self.rows.length[rows_S] - np.maximum(self.rows.num_drafts[rows_S], 1))',
    ),
    "a processor hears of refused tokens": (SAMPLER, "Sampler.finish", "sampled.continues(ANY)", "True"),
    "refused tokens are reported": (STEP, "SampledStep.continues", "self.continues_S is None", "True"),
    "counts are without draft tokens": (
        BUILTIN, "Penalties.apply", "_put(selected.lengths, logits_SV)",
        "_put(selected.lengths - state.num_drafts[selected.rows], logits_SV)",
    ),
    "bad words see only the known tokens": (
        BUILTIN, "BadWords.apply", "selected.lengths.tolist()",
        "(selected.lengths - selected.state.num_drafts[selected.rows]).tolist()",
    ),
    "min_tokens counts the known tokens": (
        PROCESSORS, "ProcessorRows.outputs", "self.lengths - ANY",
        "self.lengths - self.state.num_prompt[self.rows] - self.state.num_drafts[self.rows]",
    ),
    "a budget is spent by draft tokens": (
        "quire.features.thinking.budget", "ThinkingBudget._forced", "copy.copy(one)", "one",
    ),
    "draft tokens are taken for known ones": (
        BATCH, "InputBatchBuilder.count", "length_B - rows.num_drafts[rows_B]", "length_B",
    ),
    "a draw is after another token": (BATCH, "_draws", "np.repeat(first, draws) + number_S", "np.repeat(first, draws)"),
    "refused tokens stay computed": (
        ROWS, "RequestRows.take_back", "lengths - 1", "np.maximum(lengths - 1, self.num_computed_tokens[rows])",
    ),
    "a state keeps refused tokens": (ROLLBACK, "StateRollback._take_back", "accepted < drafts", "False"),
    "a state is taken back too far": (
        ROLLBACK, "StateRollback._take_back", "self.states.take_back(item.row, accepted)",
        "self.states.take_back(item.row, max(accepted - 1, 0))",
    ),
    "the state after another token is kept": (
        ROLLBACK, "StateRollback.before", "range(first, first + drafts)", "range(first + drafts - 1, first - 1, -1)",
    ),
    "KV is published too early": (
        "quire.kvcache.manager", "KVManager.publish", "min(ANY, ANY)",
        "min(request.num_computed_tokens, len(request.tokens) + request.num_pending_tokens)",
    ),
}  # fmt: skip


class ToyState(StateLayer):
    """A decaying sum of a row's tokens."""

    def state_spec(self) -> StateSpec:
        return StateSpec(((1,),), ("float32",))

    def forward(self, ids_T: Tensor) -> Tensor:
        if not self.state:
            return torch.zeros(len(ids_T))
        batch, x_TC = current_batch(), ids_T[:, None].float()
        rows = StateRows(batch.rows_B, batch.query_start_B1, batch.extras.get(KEPT_STATES))
        return decaying_sum.reference(x_TC, torch.full_like(x_TC, 0.5), self.state[0], rows)[:, 0]


class ToyModel(nn.Module):
    """Its hidden state of a token is a hash of the six tokens up to it, and of the state."""

    vocab_size, per_request = VOCAB, False

    def __init__(self, num_slots: int, block_size: int):
        super().__init__()
        self.memory, self.block_size, self.state = [-1] * num_slots, block_size, ToyState()
        draw = torch.Generator().manual_seed(3)
        self.table_HV = 2.0 * torch.randn(HASHES, VOCAB, generator=draw)

    def embed(self, ids_T: Tensor) -> Tensor:
        return ids_T[:, None].float()

    def forward(self, ids_T1: Tensor, positions_T: Tensor) -> Tensor:
        batch, out = current_batch(), []
        ids = ids_T1[:, 0].long()
        for slot, id in zip(batch.slots[0].tolist(), ids.tolist(), strict=True):
            self.memory[slot] = id
        states = (16 * self.state(ids)).long().tolist()
        tables, starts = batch.block_tables[0].tolist(), batch.query_start_B1.tolist()
        for b, (start, end) in enumerate(itertools.pairwise(starts)):
            for t in range(start, end):
                last, value = int(positions_T[t]), states[t]
                for position in range(max(last - 5, 0), last + 1):
                    block, offset = divmod(position, self.block_size)
                    value = (
                        131 * value + self.memory[tables[b][block] * self.block_size + offset] + 7
                    )
                out.append([float(value % HASHES)])
        return torch.tensor(out)

    def logits(self, hidden_SD: Tensor) -> Tensor:
        return self.table_HV[hidden_SD[:, 0].long()]


class HistoryBias(Processor):
    """A user's processor: it prefers a token by the outputs so far, which it is told, and those that it reads."""

    accepts_drafts = needs_tokens = True

    def __init__(self) -> None:
        self.outputs: dict[int, list[int]] = {}

    def enter(self, new: Any) -> bool:
        if new.sampling_params.seed % 4:
            return False
        self.outputs[new.row] = list(new.tokens[new.num_prompt :])
        return True

    def leave(self, row: int) -> None:
        del self.outputs[row]

    def on_tokens(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        for row, token in zip(rows, tokens, strict=True):
            self.outputs[row].append(token)

    def apply(self, logits_SV: Tensor, selected: ProcessorRows) -> Tensor:
        state = selected.state
        for index, row, length in zip(
            selected.indices, selected.rows.tolist(), selected.lengths.tolist(), strict=True
        ):
            told, start = self.outputs[row], int(state.num_prompt[row])
            ahead = state.tokens_of(row, start + len(told), length)
            logits_SV[index, (sum(told) + sum(ahead)) % VOCAB] += 2.0
        return logits_SV


class TimelessController(SpeculationController):
    """Every step takes a second, so a workload is the same on a loaded machine."""

    def record(
        self, num_rows: int, num_tokens: int, num_drafts: int, seconds: float, decodes: bool
    ) -> None:
        super().record(num_rows, num_tokens, num_drafts, 1.0, decodes)


class SleepingController(TimelessController):
    """The drafter sleeps at random: it misses steps, and requests that come and go."""

    def __init__(self, max_drafts: int, fixed: bool, rng: random.Random):
        super().__init__(max_drafts, fixed)
        self.rng, self.asleep = rng, False

    def sleeps(self, num_rows: int) -> bool:
        if self.rng.random() < 0.1:
            self.asleep = not self.asleep
        return self.asleep


def engine(
    rng: random.Random, answers: dict[tuple[int, ...], list[int]] | None, has_state: bool
) -> EngineCore:
    """Without answers: without draft tokens, and with much room."""
    k = 0 if answers is None else rng.choice([1, 2, 3, 6])
    size, depth = rng.choice([2, 4, 8]), 1 if answers is None else rng.choice([1, 1, 2, 3])
    each = -(-(LONGEST + (k + 1) * depth) // size) + 1
    num_blocks = 1 + each * (8 if answers is None else rng.choice([1, 2, 8]))
    rows = RequestRows(4, LONGEST, 1, size)
    model = ToyModel(num_blocks * size, size)
    sampler = Sampler(model, rows, processors=[HistoryBias(), ThinkingBudget()])  # type: ignore[arg-type]
    states = RowStates(4, num_drafts=k)
    states.allocate([model.state] if has_state else [])
    hooks: list[Any] = [StateHook(states)]
    gates = []
    if answers is not None:
        right = rng.choice([0.0, 0.6, 0.9, 1.0])
        drafter, fixed = KnownAnswers(answers, right, rng), rng.random() < 0.7
        controller = TimelessController(k, fixed)
        if rng.random() < 0.3:
            controller = SleepingController(k, fixed, random.Random(rng.random()))
        hooks += [
            StateRollback(states, rows),
            SpeculationHook(rows, drafter, controller, lambda rows: k, waits=depth == 1),
        ]
        gates = [SpeculationGate(k)]
    worker = Worker(None, model, TokenModelInput(model), sampler, hooks, rows)  # type: ignore[arg-type]
    kv = KVManager(
        BlockPool(num_blocks, 1), [CacheGroup(CacheSpec(1, 1, 1, "int8"), (0,))], size,
        caching=not has_state, hasher=Hasher(size, b"secret"),
    )  # fmt: skip
    budget = 256 if answers is None else rng.choice([k + 1, 9, 40])
    limits = SchedulerLimits(
        max_rows=4, max_step_tokens=budget, max_length=LONGEST, drafts=k, depth=depth
    )
    return EngineCore(
        Scheduler(kv, limits, gates, clock=lambda: 0.0), InlineExecutor(worker), depth
    )


def draw_requests(rng: random.Random) -> list[EngineRequest]:
    shared, found = [rng.randrange(VOCAB) for _ in range(9)], []
    for number in range(rng.randint(3, 9)):
        prompt = shared[: rng.randint(0, 9)] + [
            rng.randrange(VOCAB) for _ in range(rng.randint(1, 9))
        ]
        most = rng.randint(1, 30)
        words = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 2))] for _ in range(12)]
        kinds: list[dict[str, Any]] = [
            {},
            {"presence_penalty": 1.5, "frequency_penalty": 1.0, "repetition_penalty": 1.5},
            {"bad_word_ids": words},
            {"min_tokens": rng.randint(0, most), "stop_token_ids": [3, 4, 5, 6]},
            {"top_k": 5, "top_p": 0.8},
            {"min_p": 0.1, "logit_bias": {1: 3.0, 2: -3.0}},
            {
                "thoughts": ThinkingMarkers(
                    rng.randint(0, 6), [[7]], [[8, 9]], rng.random() < 0.7, True
                )
            },
            {
                "allowed_token_ids": [11],
                "bad_word_ids": [[11] * rng.randint(2, 9)],
            },  # it fails on the way
        ]
        params = SamplingParams(
            max_tokens=most, seed=number, temperature=rng.choice([0.0, 0.7, 1.3]),
            logprobs=rng.choice([None, None, 2]), ignore_eos=True, **rng.choice(kinds),
        )  # fmt: skip
        found.append(EngineRequest(str(number), prompt, params, priority=rng.randint(0, 1)))
    return found


def run(
    core: EngineCore, asked: Sequence[EngineRequest], rng: random.Random, aborts: bool = False
) -> dict[str, Any]:
    """By id: tokens, reported scores, end. An aborted request has no end."""
    to_come = [msgspec.structs.replace(one) for one in asked]
    got: dict[str, Any] = {one.id: ([], [], None) for one in asked}
    for _ in range(5000):
        while to_come and rng.random() < 0.5:
            core.inbox.put(to_come.pop(0))
        if aborts and rng.random() < 0.02:
            core.inbox.put(Abort([rng.choice(asked).id]))
        outputs = core.receive(block=False) + core.step()
        for output in outputs:
            tokens, scores, _ = got[output.id]
            tokens += output.tokens
            if output.logprobs is not None:
                scores += zip(
                    output.logprobs.token_ids,
                    output.logprobs.values,
                    output.logprobs.ranks,
                    strict=True,
                )
            ended = (output.finish, output.stopped_by, output.error)
            got[output.id] = tokens, scores, ended if output.finish else None
        if not (to_come or core.scheduler.has_work or core.in_flight):
            core.scheduler.check()
            return got
    raise AssertionError("no progress")


def trial(seed: int) -> dict[str, float]:
    """Run and check one workload, with two settings. Returns the counts of draft tokens."""
    rng = random.Random(seed)
    asked, has_state = draw_requests(rng), rng.random() < 0.5
    expected = run(engine(rng, None, has_state), asked, rng)
    answers = {tuple(one.tokens): expected[one.id][0] for one in asked}
    counts: dict[str, float] = {}
    for aborts in (False, True):
        core = engine(rng, answers, has_state)
        for id, (tokens, scores, end) in run(core, asked, rng, aborts).items():
            want, want_scores, want_end = expected[id]
            if end is not None and end[0] == "abort":
                want, want_scores, want_end = want[: len(tokens)], want_scores[: len(scores)], end
            assert (tokens, end) == (want, want_end), f"seed {seed}, request {id}"
            assert scores == want_scores, f"seed {seed}, request {id}: scores"
        for name, value in core.scheduler.gates[0].counts.items():  # type: ignore[attr-defined]
            counts[name] = counts.get(name, 0) + value
    return counts


def trials(count: int) -> None:
    for seed in range(count):
        trial(seed)
