"""Recurrent states that were kept give the same tokens and log-probabilities as computed ones, `==`: for every family of hybrid models,
schedule and place where the kept part of a prompt ends; and a state without all of its parts, or of another engine, is a miss."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from equality.engines import VOCAB, Engine, greedy, make_checkpoint, prompts
from kv_tiers.kept import (
    SIZE,
    count,
    disk_of,
    fail_first_copies,
    gate_of,
    hits,
    kept,
    save_all,
    until,
)
from kv_tiers.kept import spoil as spoil_blocks
from kv_tiers.redis_server import client, needs_redis, redis_server
from kv_tiers.test_kept_tokens import COUNT, answers, computed, flat
from kv_tiers.test_shared_blocks import sharing
from parallel.thread_engine import split_engine

from quire.cli import kv
from quire.features.kv_tiers import feature, rates
from quire.features.kv_tiers.copies import BlockCopies
from quire.features.kv_tiers.hook import KVTierHook
from quire.kvcache.specs import StateSpec
from quire.kvstore.key_file import make_key
from quire.kvstore.record import PAGE, BadRecord
from quire.kvstore.staging import Staging
from quire.layers.recurrent import RecurrentLayer
from quire.ops.cpu.bindings import best
from quire.protocol.plan import StepPlan
from quire.worker.row_states import RowStates
from quire.worker.state_hook import StateHook, StateMoves
from tests.broken_rule import broken
from tests.models.cases import write
from tests.models.recurrent_cases import CASES
from tests.models.state_models import Memory, register, to_memory

BOUNDARY = 2 * SIZE
SETTINGS: dict[str, Any] = {
    "mamba_block_size": BOUNDARY, "prefix_cache_retention_interval": BOUNDARY,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5": {},  # attention and delta nets
    "hybrid": {},  # the smallest: attention, and a sum
    "recurrent gemma": {},  # windows and a linear recurrence
    "mamba2": {},  # no attention: only states are kept
    "falcon h1": {},  # attention and Mamba 2
    "qwen3_5 tiled": {"dtype": "bfloat16"},
    "granite 4 h": {"dtype": "bfloat16"},
}
BEGINNING = [9, 8, 7] * 15
PROMPTS = [BEGINNING + prompt for prompt in prompts(5, longest=40)]


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """Path of the tiny checkpoint of a family, made once."""
    made: dict[str, str] = {}
    patch = pytest.MonkeyPatch()
    register(patch)

    def get(family: str) -> str:
        if family not in made:
            folder = tmp_path_factory.mktemp(family.replace(" ", "-"))
            if family == "hybrid":
                made[family] = make_checkpoint("llama", folder, tie_word_embeddings=True)
                to_memory(folder, "MemoryForCausalLM")
            else:
                case = next(case for case in CASES if case.name == family)
                write(replace(case, config={**case.config, "vocab_size": VOCAB}), folder)
                made[family] = str(folder)
        return made[family]

    yield get
    patch.undo()


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state has several parts, if it has more bytes than a block."""
    monkeypatch.setattr(feature, "PART_BYTES", 1024)


def spoil(one: Engine) -> None:
    """Forget all blocks and states, and overwrite them."""
    spoil_blocks(one)
    worker: Any = one.client.core.executor.worker  # type: ignore[attr-defined]
    next(hook for hook in worker.hooks if hook.name == "kv_tiers").states.storage.fill_(255)


def reading_states(one: Engine, change: Callable[[int], None]) -> None:
    """Before a part of a state is read from disk, call `change` with its number."""
    store: Any = disk_of(one)
    read, first = store.read, gate_of(one).states.first_group

    def read_some(key: Any, length: int, record: memoryview) -> None:
        if key[0] >= first:
            change(key[0] - first)
        read(key, length, record)

    store.read = read_some


def checked(one: Engine) -> None:
    one.client.core.scheduler.check()
    gate = gate_of(one)
    assert not gate.states.pool.reserved
    assert gate.staging.num_free == gate.staging.num_slots


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_same_tokens_after_a_restart(
    family: str, model_of: Callable[[str], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And `quire kv ls` counts blocks and states apart."""
    settings = {**SETTINGS, **FAMILIES[family]}
    if settings.get("dtype") == "bfloat16" and best() is None:
        pytest.skip("in bfloat16 only the kernels keep bits apart")
    path = model_of(family)
    expected = flat(computed(path, PROMPTS, **settings))
    for number in range(2):
        with kept(path, tmp_path / "kv", **settings) as one:
            spoil(one)
            assert flat(answers(one, PROMPTS)) == expected
            assert (hits(one) >= BOUNDARY) == (number == 1)
            save_all(one)
            spoil(one)
            assert flat(answers(one, PROMPTS)) == expected
            assert hits(one) >= BOUNDARY * (number + 1)
            save_all(one)
            checked(one)
            num_parts = len(gate_of(one).states.part_bytes)
            assert num_parts > 1 or family in ("hybrid", "recurrent gemma")
            first, groups = gate_of(one).states.first_group, [group for group, _ in disk_of(one).index]  # fmt: skip
    assert kv.main(["ls", str(tmp_path / "kv")]) == 0
    num_blocks = sum(group < first for group in groups)
    assert f" {num_blocks}, {groups.count(first)} recurrent states, " in capsys.readouterr().out


SCHEDULES: dict[str, dict[str, Any]] = {
    "three": {"depth": 3},
    "chunks": {"depth": 2, "max_num_batched_tokens": 7, "max_num_seqs": 3},
    "one step at a time": {"depth": 1},
    "few blocks": {"depth": 2, "num_gpu_blocks_override": 12, "max_model_len": 96},
    "few checkpoints": {"depth": 2, "max_num_seqs": 3},
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_has_the_same_tokens(
    schedule: str, model_of: Callable[[str], str], tmp_path: Path
) -> None:
    path, settings = model_of("hybrid"), {**SETTINGS, **SCHEDULES[schedule]}
    expected = flat(computed(path, PROMPTS, **SETTINGS))
    for _ in range(2):
        with kept(path, tmp_path / "kv", **settings) as one:
            if schedule == "few checkpoints":
                gate_of(one).states.pool.size = 3
            for _ in range(2):
                spoil(one)
                assert flat(answers(one, PROMPTS)) == expected
                save_all(one)
            checked(one)
    assert hits(one) >= BOUNDARY


@pytest.mark.parametrize("family", ["mamba2", pytest.param("hybrid", marks=pytest.mark.slow)])
def test_the_kept_part_may_end_anywhere(
    family: str, model_of: Callable[[str], str], tmp_path: Path
) -> None:
    """At every edge of a block, beside it and in the middle: loaded is what ends at the last state before."""
    path, whole = model_of(family), [*BEGINNING, *range(20, 80)]
    lengths = [n * SIZE + d for n in range(1, 6) for d in (-1, 0, 1, SIZE // 2)]
    asked = [[*whole[:length], 150 + n, 3, 5] for n, length in enumerate(lengths)]
    asked += [whole[:length] for length in lengths]
    expected = flat(computed(path, asked, **SETTINGS))
    with kept(path, tmp_path / "kv", **SETTINGS) as one:
        answers(one, [whole])
    with kept(path, tmp_path / "kv", kv_disk_write="second-use", **SETTINGS) as one:
        for prompt, each in zip(asked, expected, strict=True):
            spoil(one)
            before = hits(one)
            assert flat(answers(one, [prompt])) == [each]
            pairs = enumerate(zip(prompt, whole, strict=False))
            shared = next((i for i, (a, b) in pairs if a != b), len(prompt))
            assert hits(one) - before == min(shared, len(prompt) - 1) // BOUNDARY * BOUNDARY
        checked(one)


@pytest.fixture
def filled(model_of: Callable[[str], str], tmp_path: Path) -> Path:
    with kept(model_of("qwen3_5"), tmp_path / "kv", **SETTINGS) as one:
        answers(one, PROMPTS)
    return tmp_path / "kv"


def missing(part: int) -> None:
    raise BadRecord("missing")


def wrong_at_the_end(part: int) -> None:
    if part == 2:
        raise BadRecord("checksum")


def broken_thread(part: int) -> None:
    raise RuntimeError("a fault of the program")


@pytest.mark.parametrize(
    "fault",
    [
        wrong_at_the_end,
        pytest.param(missing, marks=pytest.mark.slow),
        pytest.param(broken_thread, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_state_that_is_not_there_as_it_should_be_is_a_miss(
    fault: Callable[[int], None], depth: int, filled: Path, model_of: Callable[[str], str]
) -> None:
    path = model_of("qwen3_5")
    expected = flat(computed(path, PROMPTS, **SETTINGS))
    with kept(path, filled, depth, **SETTINGS) as one:
        reading_states(one, fault)
        assert len(gate_of(one).states.part_bytes) > 2
        assert flat(answers(one, PROMPTS)) == expected
        assert hits(one) == 0
        save_all(one)
        checked(one)


def test_a_state_without_one_of_its_parts_is_not_kept(
    filled: Path, model_of: Callable[[str], str]
) -> None:
    path = model_of("qwen3_5")
    expected = flat(computed(path, PROMPTS, **SETTINGS))
    with kept(path, filled, **SETTINGS) as one:
        store, first = disk_of(one), gate_of(one).states.first_group
        store.index = {key: place for key, place in store.index.items() if key[0] != first + 1}
        assert flat(answers(one, PROMPTS)) == expected
        assert hits(one) == count(one, "kv_load_failures:missing") == 0


@pytest.mark.slow
def test_a_state_that_is_late(
    filled: Path, model_of: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rates, "GRACE_S", 0.05)
    monkeypatch.setattr(rates, "PATIENCE", 0.0)
    path = model_of("qwen3_5")
    expected = flat(computed(path, PROMPTS, **SETTINGS))
    with kept(path, filled, **SETTINGS) as one:
        reading_states(one, lambda part: time.sleep(0.4))
        assert flat(answers(one, PROMPTS)) == expected
        assert count(one, "kv_load_failures:late") > 0
        save_all(one)
        staging = gate_of(one).staging
        until(lambda: staging.num_free == staging.num_slots, "readers give their slots back")
        checked(one)


@pytest.mark.parametrize(
    "depth", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3]
)
def test_a_step_that_fails_while_it_loads(
    depth: int, filled: Path, model_of: Callable[[str], str]
) -> None:
    """Its requests end with an error, and nobody continues from a state of which parts are missing."""
    path = model_of("qwen3_5")
    expected = flat(computed(path, PROMPTS, **SETTINGS))
    with kept(path, filled, depth, **SETTINGS) as one:
        spoil(one)
        failures = fail_first_copies(one)
        with suppress(RuntimeError):  # the step had work, or only copies
            assert flat(answers(one, PROMPTS)) == expected
        core = one.client.core
        while core.in_flight or core.scheduler.requests:
            core.step()
        assert failures
        assert flat(answers(one, PROMPTS)) == expected
        save_all(one)
        checked(one)


def test_the_interval_may_change_but_not_the_format(
    filled: Path, model_of: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state depends on the tokens before it, not on where others are kept. Other shapes or formats have another identity."""
    path, other = model_of("qwen3_5"), {**SETTINGS, "prefix_cache_retention_interval": 2 * BOUNDARY}
    expected = flat(computed(path, PROMPTS, **SETTINGS))
    with kept(path, filled, **other) as one:
        assert flat(answers(one, PROMPTS)) == expected
        assert hits(one) >= BOUNDARY
    with monkeypatch.context() as patch:
        spec = RecurrentLayer.state_spec
        patch.setattr(RecurrentLayer, "state_spec", lambda self: wider(spec(self)))
        with kept(path, filled, **SETTINGS) as one:
            assert not disk_of(one).index


def wider(spec: StateSpec) -> StateSpec:
    """With convolution states in another format."""
    return StateSpec(spec.shapes, (spec.dtypes[0], "bfloat16"))


@pytest.mark.slow
def test_a_second_use_is_written(model_of: Callable[[str], str], tmp_path: Path) -> None:
    settings = {**SETTINGS, "kv_disk_write": "second-use"}
    with kept(model_of("qwen3_5"), tmp_path / "kv", **settings) as one:
        answers(one, PROMPTS[:1])
        save_all(one)
        assert not disk_of(one).index
        answers(one, [[*BEGINNING, 1, 2]])
        save_all(one)
        gate = gate_of(one)
        num_parts = len(gate.states.part_bytes)
        assert len(disk_of(one).index) == num_parts + BOUNDARY // SIZE
        assert sum(gate.states.is_part(key) for key in disk_of(one).index) == num_parts


def test_usage_and_metrics_count_states(filled: Path, model_of: Callable[[str], str]) -> None:
    with kept(model_of("qwen3_5"), filled, **SETTINGS) as one:
        (output, *_), gate = one.run([PROMPTS[0]], greedy(2))[0], gate_of(one)
        loaded = output.num_cached_tokens
        assert (output.loaded_tokens, loaded % BOUNDARY) == ({"disk": loaded}, 0)
        num_bytes = loaded // SIZE * sum(gate.group_bytes) + sum(gate.states.part_bytes)
        assert count(one, "kv_load_bytes:disk") == num_bytes
        assert one.client.core.stats().histograms["kv_load_size"][-1] == num_bytes
        again = one.run([PROMPTS[0]], greedy(2))[0][0]
        assert (again.loaded_tokens, again.num_cached_tokens) == ({}, loaded)
        checked(one)


@pytest.mark.slow
def test_a_sleeping_engine_loads_when_it_is_awake(
    filled: Path, model_of: Callable[[str], str]
) -> None:
    path = model_of("qwen3_5")
    expected = flat(computed(path, PROMPTS, **SETTINGS))
    with kept(path, filled, **SETTINGS) as one:
        for level in (1, 2):
            one.client.call("sleep", level)
            one.client.call("wake_up")
            before = hits(one)
            assert flat(answers(one, PROMPTS)) == expected
            assert hits(one) > before
        save_all(one)
        checked(one)


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)])
def test_ranks_keep_their_parts_of_states(tensor: int, pipeline: int, tmp_path: Path) -> None:
    """A rank has some heads of each state, or the states of some layers."""
    case = next(case for case in CASES if case.name == "qwen3_5 tiled")
    write(replace(case, config={**case.config, "vocab_size": VOCAB}), tmp_path / "model")
    settings = {**SETTINGS, "block_size": SIZE, "skip_tokenizer_init": True, "dtype": "bfloat16"}
    path = str(tmp_path / "model")
    with split_engine(path, tensor, pipeline, **settings) as one:
        expected = one.tokens(PROMPTS, greedy(COUNT))
    settings |= {"kv_disk_dir": str(tmp_path / "kv"), "kv_disk_write": "always"}
    for number in range(2):
        with split_engine(path, tensor, pipeline, **settings) as one:
            store: Any = disk_of(one)
            until(lambda store=store: store.num_refreshes, "the store opens")
            assert one.tokens(PROMPTS, greedy(COUNT)) == expected
            save_all(one)
            assert (hits(one) >= BOUNDARY) == (number == 1)
            checked(one)


@needs_redis
@pytest.mark.parametrize("family", ["qwen3_5", pytest.param("mamba2", marks=pytest.mark.slow)])
def test_engines_share_states_in_redis(
    family: str, model_of: Callable[[str], str], tmp_path: Path
) -> None:
    """A server that has lost a part of a state has no state there: an earlier one, or none, is loaded."""
    path, key = model_of(family), tmp_path / "key"
    make_key(key)
    expected = flat(computed(path, PROMPTS, **SETTINGS))
    with redis_server(tmp_path) as url:
        with sharing(path, url, key, **SETTINGS) as one:
            assert flat(answers(one, PROMPTS)) == expected
            save_all(one)
        with sharing(path, url, key, 3, **SETTINGS) as two:
            spoil(two)
            assert flat(answers(two, PROMPTS)) == expected
            assert hits(two) == count(two, "kv_cached_tokens:redis") >= BOUNDARY
            last = gate_of(two).states.first_group + 1
        server = client(url)
        server.delete(*server.keys(f"quire:*:{last}:*"))
        with sharing(path, url, key, **SETTINGS) as three:
            assert flat(answers(three, PROMPTS)) == expected
            assert hits(three) == 0
            save_all(three)
            checked(three)


def test_workers_refuse_a_state_of_which_a_plan_with_parts_has_failed() -> None:
    """Another request may find the checkpoint before the failure is known; its step must fail, too."""
    states, staging = RowStates(1, num_checkpoints=1), Staging(2 * PAGE, 3, 1)
    states.allocate([Memory(16)])
    hook, rows = KVTierHook([], states), StateHook(states)
    hook.attach(staging.path, {hook.id: (0, [0] * 4)}, 2 * PAGE, 3)

    def run(step: int, part: int, before: int) -> None:
        copies = BlockCopies(loads=[(part, 1 + part, 0)], filled=[(0, before)])
        hook.before(StepPlan(step, [], [], [], {hook.name: msgspec.msgpack.encode(copies)}), None)

    def go_on(step: int) -> None:
        moves = msgspec.msgpack.encode(StateMoves(loads=[(0, 0, step)]))
        rows.before(StepPlan(step + 1, [], [], [], {rows.name: moves}), None)

    for step in (1, 2, 3):
        run(step, step - 1, step - 1)
    go_on(3)
    run(5, 0, 0)
    run(7, 2, 6)  # step 6 has failed
    with pytest.raises(RuntimeError, match="step 7, which failed"):
        go_on(7)


HOOK = "quire.features.kv_tiers.hook"
OF_COPIES = {
    "a part is copied to another place": (HOOK, "KVTierHook._places", "self.states.checkpoint(block)[begin:end]", "self.states.checkpoint(block)[:end - begin]"),
    "a part of a state is not copied": (HOOK, "KVTierHook._places", "begin < end", "begin == 0"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_COPIES)
def test_the_tokens_notice_a_broken_copy(
    name: str, model_of: Callable[[str], str], tmp_path: Path
) -> None:
    path = model_of("qwen3_5")
    expected = flat(computed(path, PROMPTS, **SETTINGS))
    with broken(*OF_COPIES[name]), kept(path, tmp_path / "kv", **SETTINGS) as one:
        assert flat(answers(one, PROMPTS)) == expected
        save_all(one)
        spoil(one)
        try:
            found: Any = flat(answers(one, PROMPTS))
        except RuntimeError as why:  # the pattern is not a number
            found = str(why)
        assert found != expected
