"""Adapters in an engine: each row's bits are its own, the base's too; loading, unloading, reloading under requests."""

from __future__ import annotations

import gc
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
from equality.engines import Engine, engine, greedy, make_checkpoint, prompts
from lora.adapters import Answer, collect, lora_engine, run, submit, tensors, write

from quire.errors import ValidationError
from quire.protocol.request import EngineRequest
from quire.protocol.sampling_params import SamplingParams

PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, seed=0, logprobs=3)
NAMES = ["a", "b", "c", "d"]
GIVEN = prompts(4, seed=5, longest=50)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint `model`, and adapters a to d of different ranks."""
    made = tmp_path_factory.mktemp("lora")
    make_checkpoint("llama", made / "model")
    for seed, (name, rank) in enumerate(zip(NAMES, (4, 1, 8, 3), strict=True)):
        write(made / name, rank, seed)
    return made


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[tuple[int, str | None], Answer]:
    """The answer to each prompt with each adapter, alone in an engine that loads one adapter at a time."""
    found = {}
    with lora_engine(str(folder / "model"), max_loras=1, max_num_seqs=1) as one:
        for name in (None, *NAMES):
            if name:
                one.client.call("load_lora", name, str(folder / name))
            for number, prompt in enumerate(GIVEN):
                found[number, name] = run(one, [prompt], [name], PARAMS)[0]
    with engine(str(folder / "model")) as one:
        base = run(one, GIVEN, [None] * len(GIVEN), PARAMS)
    assert base == [found[number, None] for number in range(len(GIVEN))]
    return found


def load(one: Engine, folder: Path, names: list[str] = NAMES) -> None:
    for name in names:
        one.client.call("load_lora", name, str(folder / name))


def registry_of(one: Engine) -> Any:
    return next(gate.registry for gate in one.client.core.scheduler.gates if gate.name == "lora")


def states(one: Engine) -> dict[str, str]:
    return {card["name"]: card["state"] for card in one.client.call("list_loras")}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("depth", "settings"),
    [
        (1, {"max_loras": 4}),
        (2, {"max_loras": 2, "max_cpu_loras": 3, "max_num_batched_tokens": 16}),
        (3, {"max_loras": 1, "enable_prefix_caching": False}),
        (2, {"max_loras": 4, "num_gpu_blocks_override": 9, "block_size": 16, "max_model_len": 96}),
    ],
)
def test_bits_of_a_row_are_its_own(depth: int, settings: dict, folder: Path, alone: dict) -> None:
    """In mixed batches, other slots, chunks, depths; preempted, evicted and loaded again; twice, for the prefix cache."""
    mixed = [(number, name) for number in range(len(GIVEN)) for name in (None, *NAMES)]
    with lora_engine(str(folder / "model"), depth, **settings) as one:
        load(one, folder, NAMES[::-1])
        for order in (mixed, mixed[::-1]):
            given = [GIVEN[number] for number, _ in order]
            answers = run(one, given, [name for _, name in order], PARAMS)
            assert answers == [alone[each] for each in order]
        if "num_gpu_blocks_override" in settings:
            assert one.stats()["preemptions"]
    assert len({str(alone[0, name]) for name in (None, *NAMES)}) == 5


def test_an_adapter_whose_b_is_zero_is_the_base(folder: Path, alone: dict, tmp_path: Path) -> None:
    zero = write(tmp_path, 4, made=tensors(4, 0, b=0.0))
    with lora_engine(str(folder / "model")) as one:
        one.client.call("load_lora", "zero", zero)
        answers = run(one, GIVEN, ["zero"] * len(GIVEN), PARAMS)
    assert answers == [alone[number, None] for number in range(len(GIVEN))]


def test_a_reload_in_place_never_answers_from_old_kv(
    folder: Path, alone: dict, tmp_path: Path
) -> None:
    path = tmp_path / "adapter"
    shutil.copytree(folder / "a", path)
    long = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, seed=0)
    with lora_engine(str(folder / "model")) as one:
        one.client.call("load_lora", "x", str(path))
        assert run(one, GIVEN, ["x"] * 4, PARAMS) == [alone[number, "a"] for number in range(4)]
        before = run(one, GIVEN[:1], ["x"], long)
        running = submit(one, GIVEN[0], long, "x")
        first = [token for output in one.client.outputs() for token in output.tokens]
        shutil.copytree(folder / "b", path, dirs_exist_ok=True)
        with pytest.raises(ValidationError, match=r"already been loaded.*load_inplace"):
            one.client.call("load_lora", "x", str(path))
        assert one.client.call("load_lora", "x", str(path), False, None, True)  # if_absent
        one.client.call("load_lora", "x", str(path), True)
        ids = [submit(one, prompt, PARAMS, "x") for prompt in GIVEN]
        got = collect(one, [running, *ids])
        assert (
            first + [t for out in got[running] for t in out.tokens] == before[0][0]
        )  # of the version that it began with
        for number, id in enumerate(ids):
            assert [t for out in got[id] for t in out.tokens] == alone[number, "b"][0]
        one.client.call("load_lora", "y", str(folder / "b"))
        cards = one.client.call("list_loras")
        assert cards[0]["version"] == cards[1]["version"]  # equal files
        assert len(registry_of(one).versions) == 1


def test_requests_end_after_their_adapter_is_unloaded(folder: Path, alone: dict) -> None:
    with lora_engine(str(folder / "model")) as one:
        load(one, folder, ["a"])
        table = one.client.core.executor.worker.model.adapters
        ids = [submit(one, prompt, PARAMS, "a") for prompt in GIVEN]
        one.client.core.receive(block=False)
        assert one.client.call("unload_lora", "a") is True
        assert one.client.call("unload_lora", "a") is False
        late = submit(one, GIVEN[0], PARAMS, "a")
        got = collect(one, [*ids, late])
        assert (got[late][-1].error_kind, got[late][-1].finish) == ("invalid", "error")
        assert "`a` does not exist" in str(got[late][-1].error)
        for number, id in enumerate(ids):
            assert [t for out in got[id] for t in out.tokens] == alone[number, "a"][0]
        assert table.loaded == [None] * len(table.loaded)
        assert registry_of(one).versions == {}
        assert one.client.call("list_loras") == []


def test_the_least_recently_used_is_evicted_and_loaded_again(folder: Path, alone: dict) -> None:
    with lora_engine(str(folder / "model"), max_loras=2, max_cpu_loras=2) as one:
        load(one, folder, ["a", "b"])
        run(one, GIVEN[:1], ["a"], PARAMS)
        load(one, folder, ["c"])
        assert states(one) == {"a": "ready", "b": "evicted", "c": "ready"}
        assert run(one, GIVEN[:1], ["b"], PARAMS) == [alone[0, "b"]]
        assert states(one) == {"a": "evicted", "b": "ready", "c": "ready"}
        assert one.client.call("pin_lora", "c") is True
        assert one.client.call("pin_lora", "z") is False
        run(one, GIVEN[:1], ["a"], PARAMS)
        assert states(one) == {"a": "ready", "b": "evicted", "c": "ready"}
        registry = registry_of(one)
        registry.fetch(registry.versions[registry.names["b"].version], 99)
        assert states(one)["b"] in ("evicted", "ready")  # requests may name it meanwhile


def test_a_load_that_fails_ends_only_the_requests_that_wait_for_it(
    folder: Path, alone: dict, tmp_path: Path
) -> None:
    path = tmp_path / "adapter"
    shutil.copytree(folder / "a", path)
    with lora_engine(str(folder / "model"), max_loras=1, max_cpu_loras=1) as one:
        one.client.call("load_lora", "x", str(path))
        load(one, folder, ["b"])
        shutil.copytree(folder / "c", path, dirs_exist_ok=True)
        ids = [submit(one, GIVEN[0], PARAMS, name) for name in ("b", "x", None, "b", "x")]
        ends = [outputs[-1] for outputs in collect(one, ids).values()]
        assert [end.finish for end in ends] == ["length", "error", "length", "length", "error"]
        assert "changed since it was loaded" in str(ends[1].error)
        assert ends[1].error_kind == "invalid"
        shutil.rmtree(path)
        end = collect(one, [submit(one, GIVEN[0], PARAMS, "x")]).popitem()[1][-1]
        assert "No adapter found for" in str(end.error)
        assert run(one, GIVEN[:2], ["b", None], PARAMS) == [alone[0, "b"], alone[1, None]]


def test_a_refused_adapter_changes_nothing(folder: Path, tmp_path: Path) -> None:
    with lora_engine(str(folder / "model"), max_lora_rank=4) as one:
        load(one, folder, ["a"])
        with pytest.raises(ValidationError, match="rank 8, more than max_lora_rank=4"):
            one.client.call("load_lora", "c", str(folder / "c"))
        with pytest.raises(ValidationError, match="rank 8"):
            one.client.call("load_lora", "a", str(folder / "c"), True)
        with pytest.raises(ValidationError, match="No adapter found"):
            one.client.call("load_lora", "d", str(tmp_path))
        with pytest.raises(ValidationError, match="name"):
            one.client.call("load_lora", " ", str(folder / "a"))
        assert states(one) == {"a": "ready"}


def test_requests_wait_for_room_in_the_step_and_are_counted(folder: Path, alone: dict) -> None:
    """Others pass; and a stream of one adapter does not keep another waiting for ever."""
    with lora_engine(str(folder / "model"), max_loras=1, max_cpu_loras=2, max_num_seqs=4) as one:
        load(one, folder, ["a", "b"])
        params, order = greedy(5), []
        stream = [submit(one, GIVEN[0], params, "a") for _ in range(2)]
        other = submit(one, GIVEN[1], params, "b")
        base = submit(one, GIVEN[2], params)
        waited, ids, seen = 0, {*stream, other, base}, set()
        while other not in order:
            for output in one.client.outputs():
                if output.finish:
                    order.append(output.id)
                    ids.discard(output.id)
                    if output.id in stream and other not in order:
                        stream.append(submit(one, GIVEN[0], params, "a"))
                        ids.add(stream[-1])
            stats = one.stats()
            waited += stats["deferred"]
            labels = stats["labels"]
            seen.add((labels["running_lora_adapters"], labels["waiting_lora_adapters"]))
        assert waited
        assert ("a", "b") in seen  # the labels of vllm:lora_requests_info
        assert labels["max_lora"] == "1"
        assert order.index(base) < order.index(other) < 60
        collect(one, list(ids))


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 2])
def test_adapters_return_after_sleep(level: int, folder: Path, alone: dict) -> None:
    with lora_engine(str(folder / "model")) as one:
        load(one, folder, ["a"])
        model = weakref.ref(one.client.core.executor.worker.model)
        assert one.client.call("sleep", level) is True
        gc.collect()
        assert (model() is None) == (level == 2)
        assert states(one) == {"a": "evicted"}
        waiting = submit(one, GIVEN[1], PARAMS, "a")
        for _ in range(3):
            one.client.core.inbox.put(None)
            one.client.core.turn()
        one.client.call("wake_up")
        got = collect(one, [waiting])[waiting]
        assert [t for out in got for t in out.tokens] == alone[1, "a"][0]
        load(one, folder, ["b"])
        assert run(one, GIVEN[:2], ["b", "a"], PARAMS) == [alone[0, "b"], alone[1, "a"]]


def test_adapters_of_the_configuration(folder: Path, alone: dict) -> None:
    modules = [
        {"name": name, "path": str(folder / name), "base_model_name": None} for name in NAMES
    ]
    with lora_engine(str(folder / "model"), lora_modules=modules) as one:
        assert states(one) == dict.fromkeys(NAMES, "ready")
        answers = run(one, GIVEN[:4], NAMES, PARAMS)
        assert answers == [alone[number, name] for number, name in enumerate(NAMES)]


def test_a_new_process_of_the_engine_knows_the_adapters(
    folder: Path, alone: dict, tmp_path: Path
) -> None:
    file = tmp_path / "adapters"
    with lora_engine(str(folder / "model")) as one:
        registry = registry_of(one)
        registry.persist(file)
        load(one, folder)
        one.client.call("unload_lora", "c")
        versions = {card["name"]: card["version"] for card in one.client.call("list_loras")}
    modules = [{"name": "c", "path": str(folder / "c"), "base_model_name": None}]
    with lora_engine(str(folder / "model"), lora_modules=modules) as one:
        registry_of(one).persist(file)
        assert one.client.core.executor.worker.model.adapters.loaded == [None, None]
        cards = {card["name"]: card for card in one.client.call("list_loras")}
        assert {name: card["version"] for name, card in cards.items()} == versions
        assert {card["state"] for card in cards.values()} == {"evicted"}
        assert run(one, GIVEN[:2], ["a", "b"], PARAMS) == [alone[0, "a"], alone[1, "b"]]


@pytest.mark.slow
def test_a_worker_of_its_own_process(folder: Path, alone: dict) -> None:
    settings = {"distributed_executor_backend": "mp", "max_loras": 1, "max_cpu_loras": 1}
    with lora_engine(str(folder / "model"), **settings) as one:
        load(one, folder, ["a", "b"])
        answers = run(one, GIVEN[:4], ["a", "b", None, "a"], PARAMS)
        assert answers == [alone[0, "a"], alone[1, "b"], alone[2, None], alone[3, "a"]]
        with pytest.raises(ValidationError, match="No adapter found"):
            one.client.call("load_lora", "d", str(folder))


def test_prefixes_are_shared_within_an_adapter_only(folder: Path) -> None:
    long = list(range(3, 83))
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)

    def hit(one: Engine, adapter: str | None, salt: str = "") -> int:
        id = str(next(one.numbers))
        one.client.submit(EngineRequest(id, long, params, adapter=adapter, salt=salt))
        return collect(one, [id])[id][-1].num_cached_tokens

    with lora_engine(str(folder / "model"), block_size=16) as one:
        load(one, folder, ["a", "b"])
        one.client.call("load_lora", "again", str(folder / "a"))
        asked = [(None, ""), ("a", ""), ("b", ""), ("a", "x"), ("b", "x"), (None, "x")]
        assert [hit(one, *each) for each in asked] == [0] * 6
        assert [hit(one, *each) for each in [*asked, ("again", "")]] == [64] * 7
