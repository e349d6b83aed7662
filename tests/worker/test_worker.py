"""A worker's steps: what its rows remember, what the batch says, what fails alone and what fails all."""

from __future__ import annotations

import pytest
import torch
from devices import BLOCK, Driver, TinyModel, enter, follow, generate, make_worker

from quire.errors import StepFailed, ValidationError
from quire.forward_context import ForwardBatch, current_batch
from quire.protocol.plan import StepPlan, WorkItem
from quire.protocol.sampling_params import SamplingParams
from quire.worker.hooks import Hook

GREEDY = SamplingParams(temperature=0.0, seed=1)


def test_rows_go_on_by_themselves():
    worker = make_worker()
    prompts = {3: ([5, 6, 7], GREEDY), 0: ([9], GREEDY), 5: (list(range(20)), GREEDY)}
    texts, _ = generate(worker, prompts, 6)
    assert texts == {row: follow(worker.model, tokens, 6) for row, (tokens, _) in prompts.items()}


def test_chunks_do_not_matter():
    worker = make_worker()
    prompt = list(range(30, 47))
    drive = Driver(worker)
    entered = [enter(2, prompt, GREEDY)]
    assert drive([WorkItem(2, 5, samples=False)], entered).tokens == [[]]
    assert drive([WorkItem(2, 11, samples=False)]).tokens == [[]]
    assert drive([WorkItem(2, 1)]).tokens == [follow(worker.model, prompt, 1)]
    # and one that resumes with output and a cached prefix
    text = follow(worker.model, prompt, 4)
    drive.left = [2]
    assert drive([WorkItem(2, 5)], [enter(2, prompt + text[:3], GREEDY, 17, 15)]).tokens == [
        text[3:]
    ]


class Watch(Hook):
    name = "watch"

    def __init__(self):
        self.steps = []

    def before(self, plan, batch):
        self.steps.append(plan.step)

    def report(self):
        return b"seen %d" % len(self.steps)


def batches_of(worker) -> list[tuple[ForwardBatch, bool]]:
    """The batches that its source will see, and whether layers would see the same."""
    seen, forward = [], worker.model_input.forward
    worker.model_input.forward = lambda batch: (
        seen.append((batch, current_batch() is batch)),
        forward(batch),
    )[1]
    return seen


def test_the_batch_contains_all_positions_and_slots():
    worker = make_worker()
    worker.hooks.append(Watch())
    seen = batches_of(worker)
    drive = Driver(worker)
    result = drive(
        [WorkItem(1, 6, samples=False), WorkItem(4, 3)],
        [enter(1, list(range(10, 20)), GREEDY), enter(4, [1, 2, 3], GREEDY)],
    )
    assert result.extras == {"watch": b"seen 1"}
    drive([WorkItem(4, 1), WorkItem(1, 4)])
    assert [known for _, known in seen] == [True, True]
    batch = seen[1][0]
    drawn = result.tokens[1][0]
    assert batch.token_ids_T.tolist() == [drawn, 16, 17, 18, 19]
    assert batch.positions_T.tolist() == [3, 6, 7, 8, 9]
    assert batch.rows_B.tolist() == [4, 1]
    assert batch.query_start_B1.tolist() == [0, 1, 5]
    assert batch.lengths_B.tolist() == batch.lengths == [4, 10]
    assert batch.query_lens == [1, 4]
    assert batch.sample_at_S.tolist() == [0, 4]
    tables = [[1 + row * 16 + i for i in range(3)] for row in (4, 1)]
    assert batch.block_tables[0].tolist() == tables
    slots = [
        tables[b][p // BLOCK] * BLOCK + p % BLOCK
        for b, p in [(0, 3), *((1, p) for p in range(6, 10))]
    ]
    assert batch.slots[0].tolist() == slots
    assert (batch.max_query, batch.max_length, batch.num_tokens, batch.num_rows) == (4, 10, 5, 2)
    wanted = {"token_ids_T": 8, "positions_T": 8, "rows_B": 8, "query_start_B1": 4, "lengths_B": 4}
    assert {name: getattr(batch, name).element_size() for name in wanted} == wanted


def test_a_hook_may_be_idle_until_a_step():
    """It hears of requests meanwhile, and of no steps."""
    worker, watch = make_worker(), Watch()
    watch.entered = []
    watch.enter = lambda new: watch.entered.append(new.row)
    worker.hooks.append(watch)
    drive = Driver(worker)
    assert drive([WorkItem(1, 1)], [enter(1, [5], GREEDY)]).extras == {"watch": b"seen 1"}
    watch.idle_until = watch.steps[-1] + 3
    for row in (2, 3):
        assert drive([WorkItem(row, 1)], [enter(row, [5], GREEDY)]).extras == {}
    assert drive([WorkItem(1, 1)]).extras == {"watch": b"seen 2"}
    assert watch.entered == [1, 2, 3]
    assert watch.steps == [watch.steps[0], watch.steps[0] + 3]


def test_blocks_of_the_plan_are_appended():
    worker = make_worker()
    seen = batches_of(worker)
    drive = Driver(worker)
    entered = enter(0, [1, 2, 3, 4], GREEDY)
    entered.blocks = [[7]]
    drive([WorkItem(0, 4)], [entered])
    drive([WorkItem(0, 1, [[9]])])
    batch = seen[1][0]
    assert batch.block_tables[0].tolist() == [[7, 9]]
    assert batch.slots[0].tolist() == [9 * BLOCK]


def test_nan_fails_its_row_alone():
    model = TinyModel()
    model.nan_after = {17}
    worker = make_worker(model)
    params = [
        GREEDY,
        SamplingParams(temperature=1.0, seed=3),
        SamplingParams(temperature=1.0, top_k=5, top_p=0.5, seed=3),
        SamplingParams(temperature=0.0, repetition_penalty=1.2, logprobs=2, seed=3),
    ]
    sick = {row: ([3, 4 if row % 2 else 17], params[row // 2]) for row in range(8)}
    well = {row: ([3, 4], params[row // 2]) for row in range(8)}
    expected, _ = generate(make_worker(), well, 1)
    drive = Driver(worker)
    result = drive([WorkItem(row, 2) for row in sick], [enter(row, *sick[row]) for row in sick])
    assert sorted(result.errors) == [0, 2, 4, 6]
    assert "NaN" in result.errors[0]
    assert [result.tokens[row] for row in (1, 3, 5, 7)] == [expected[row] for row in (1, 3, 5, 7)]
    # the greedy path has its own check
    worker = make_worker(model)
    result = Driver(worker)(
        [WorkItem(0, 1), WorkItem(1, 1)], [enter(0, [17], GREEDY), enter(1, [4], GREEDY)]
    )
    assert list(result.errors) == [0]


def test_a_failing_pass_fails_its_step_alone():
    worker = make_worker()
    drive = Driver(worker)
    drive([WorkItem(0, 2)], [enter(0, [5, 6], GREEDY)])
    worker.model.fail = True
    with pytest.raises(StepFailed, match="ValueError: the toy fails"):
        drive([WorkItem(1, 2)], [enter(1, [5, 6], GREEDY)])
    worker.model.fail = False
    drive.left = [1]
    assert drive([WorkItem(0, 1)]).tokens == [follow(worker.model, [5, 6], 2)[1:]]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (StepPlan(1, [], [], [0]), "no request has it"),
        (StepPlan(1, [enter(0, [1], GREEDY), enter(0, [1], GREEDY)], [], []), "belongs to"),
        (StepPlan(1, [enter(0, [1] * 65, GREEDY)], [], []), "holds 64"),
        (StepPlan(1, [enter(0, [1], GREEDY)], [WorkItem(0, 2)], []), "lacks the tokens"),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(plan, message):
    with pytest.raises(RuntimeError, match=message):
        make_worker().run(plan)


def test_token_ids_outside_the_vocabulary_fail_their_row_alone():
    worker = make_worker()
    drive = Driver(worker)
    wrong = SamplingParams(temperature=0.0, logit_bias={211: 1.0}, seed=0)
    result = drive(
        [WorkItem(0, 1), WorkItem(1, 2), WorkItem(2, 1), WorkItem(3, 2), WorkItem(4, 2)],
        [
            enter(0, [5], GREEDY),
            enter(1, [5, 211], GREEDY),
            enter(2, [5], wrong),
            enter(3, [5, -1], GREEDY),
            enter(4, [5, 1 << 40], GREEDY),
        ],
    )
    prompt = "prompt has a token id outside the vocabulary of 211"
    bias = "logit_bias has a token id outside the vocabulary of 211"
    assert result.errors == {1: prompt, 2: bias, 3: prompt, 4: prompt}
    assert result.tokens[0] == follow(worker.model, [5], 1)


def test_models_with_row_state_are_notified_of_changes():
    model = TinyModel()
    told = []
    model.per_request, model.forget = True, lambda rows: told.append(rows)
    drive = Driver(make_worker(model))
    drive([WorkItem(1, 1)], [enter(1, [5], GREEDY)])
    drive([WorkItem(1, 1)])
    drive.left = [1]
    drive([WorkItem(2, 1)], [enter(2, [5], GREEDY)])
    assert told == [[1], [1, 2]]


def test_calls():
    worker = make_worker()
    assert worker.call("ping") is True
    assert worker.call("num_parameters") == sum(p.numel() for p in worker.model.parameters())
    assert worker.call("collective_rpc", "ping") is True
    worker.greet = lambda name, sign=".": f"hello {name}{sign}"
    assert worker.call("collective_rpc", "greet", ["you"], {"sign": "!"}) == "hello you!"
    with pytest.raises(ValueError, match="no function 'nonsense'; it has"):
        worker.call("nonsense")
    with pytest.raises(
        ValidationError,
        match=r"no function or method '_update_rows'; it has .*num_parameters.*, run",
    ):
        worker.call("collective_rpc", "_update_rows")
    for args in (["greet"], ["greet", ["you", "!", 1]], ["greet", ["you"], {"end": "!"}]):
        with pytest.raises(ValidationError, match=r"'greet': .*argument"):
            worker.call("collective_rpc", *args)


def test_tokens_are_stored_in_rows():
    worker = make_worker()
    generate(worker, {0: ([5, 6], GREEDY)}, 3)
    text = follow(worker.model, [5, 6], 3)
    assert worker.rows.token_ids_RL[0, :5].tolist() == [5, 6, *text]
    assert worker.rows.token_ids_RL.dtype == torch.int32


def test_extreme_logits_do_not_affect_other_rows():
    """As it may come over a wire: the worker goes on, and so does the neighbour."""
    worker = make_worker()
    odd = SamplingParams(temperature=1.0, seed=1)
    odd.top_k = 1 << 63
    entered = [enter(1, [4, 5], odd), enter(2, [6, 7], GREEDY)]
    result = Driver(worker)([WorkItem(1, 2), WorkItem(2, 2)], entered)
    assert result.tokens[1] == follow(worker.model, [6, 7], 1)
    assert set(result.errors) <= {0}


def test_parameters_that_cannot_be_used_fail_their_request(monkeypatch):
    worker = make_worker()
    monkeypatch.setattr(
        worker.model_output.pipeline, "enter", lambda new: 1 / 0 if new.row == 1 else None
    )
    entered = [enter(1, [4, 5], GREEDY), enter(2, [6, 7], GREEDY)]
    result = Driver(worker)([WorkItem(1, 2), WorkItem(2, 2)], entered)
    assert "parameters are not valid" in result.errors[0]
    assert result.tokens[1] == follow(worker.model, [6, 7], 1)
