"""A feature of an installed package uses every part of `Feature`: at each depth, with ranks, fast step, sleep and restart."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from equality.engines import Engine, engine, greedy, make_checkpoint, prompts
from parallel.thread_engine import split_engine

from quire.config.engine import EngineConfig
from quire.engine.build import make_client
from quire.engine.enabled_features import enabled_features
from quire.errors import ConfigError, QuireError, ValidationError
from quire.frontend.chat import ChatOptions
from quire.frontend.request_manager import RequestManager
from quire.ops.cpu.bindings import best
from quire.parallel.layout import RankLayout
from quire.protocol.sampling_params import SamplingParams
from quire.worker.memory_forecast import plan_memory

HERE = Path(__file__).parent
DEMO = (
    "[quire.features]\ndemo = demo_feature:DemoFeature\nconstant = demo_feature:ConstantFeature\n"
)
SIZES = {"head_dim": 32, "intermediate_size": 128, "tie_word_embeddings": False}
ASKED = prompts(4, longest=40)
COUNT = 12
IDS = (f"r{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models")
    make_checkpoint("llama", folder / "second", **SIZES, num_hidden_layers=1)
    return make_checkpoint("qwen3", folder / "main", **SIZES)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is installed, for this process and its children."""
    install(tmp_path, DEMO)
    folders = [str(HERE), str(tmp_path)]
    for folder in folders:
        monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")]))


def install(folder: Path, entry_points: str) -> None:
    described = folder / "demo_feature-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: demo-feature\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text(entry_points)


def run(one: Engine, banned: dict[int, int]) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """Tokens and details of the prompts in one batch; `banned`: a token by prompt."""
    front = RequestManager(one.client)  # type: ignore[arg-type]
    collectors = []
    for number, prompt in enumerate(ASKED):
        params = greedy(COUNT)
        if number in banned:
            params.extra_args = {"demo": banned[number]}
        collectors.append(front.submit(front.accept(prompt, params, id=next(IDS))))
    while not all(each.finished for each in collectors):
        front.process_outputs(one.client.outputs())
    answers = [each.take().outputs[0] for each in collectors]  # type: ignore[union-attr]
    assert not any(answer.error for answer in answers), answers
    return [answer.token_ids for answer in answers], [answer.details for answer in answers]


def check_tokens(one: Engine, plain: list[list[int]]) -> None:
    """Only requests with extras change, and only from the token on that they may not have."""
    banned = {1: plain[1][3], 2: plain[2][0]}
    tokens, details = run(one, banned)
    for number, (now, before) in enumerate(zip(tokens, plain, strict=True)):
        token = banned.get(number)
        if token is None:
            assert now == before
            assert details[number] == {}
        else:
            first = before.index(token)
            assert now[:first] == before[:first]
            assert token not in now
            assert details[number] == {"demo": {"steps": COUNT, "tokens": COUNT}}


@pytest.fixture(scope="module")
def plain(path: str) -> list[list[int]]:
    with engine(path, dtype="bfloat16", skip_tokenizer_init=True) as one:
        return run(one, {})[0]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_every_part_is_used(path: str, plain: list[list[int]], depth: int, installed: None) -> None:
    with engine(path, depth, dtype="bfloat16", skip_tokenizer_init=True, block_size=16) as one:
        core = one.client.core
        assert run(one, {})[0] == plain
        (state,) = core.executor.call("demo_state")
        assert state["models"] == 1
        assert state["weights"] > 0
        assert state["passes"] == state["by parts"]
        assert bool(state["fast"]) == (best() is not None)
        check_tokens(one, plain)
        (after,) = core.executor.call("demo_state")
        assert after["numbers"] == [6, 7]  # the second and third of the requests of the second run
        stats = one.client.stats()
        assert stats.counts["demo_steps"] > 0
        assert one.client.call("demo_add", 5) == 5
        assert one.client.stats(fresh=True).labels["demo"] == "total 5"
        scheduler = core.scheduler
        assert scheduler.limits.max_waiting == 20
        assert scheduler.waiting.added == 2 * len(ASKED)
        assert [gate.name for gate in scheduler.gates] == ["structured", "demo", "resumed_requests"]
        assert scheduler.gates[1].usable_asked > 0
        hooks = core.executor.worker.hooks
        assert [hook.name for hook in hooks] == ["structured", "demo", "pages"]
        names = [each.name for each in core.executor.worker.model_output.pipeline.processors]
        assert names.index("GrammarMasks") < names.index("DemoProcessor")


def test_it_hears_what_happens_to_the_engine(
    path: str, plain: list[list[int]], installed: None
) -> None:
    """And its model sleeps and wakes up with the main one."""
    with engine(path, dtype="bfloat16", skip_tokenizer_init=True) as one:
        call, workers = one.client.call, one.client.core.executor.call
        (before,) = workers("demo_state")
        for level in (1, 2):
            call("sleep", level)
            (asleep,) = workers("demo_state")
            assert (asleep["weights"] == 0) == (level == 2)
            call("wake_up")
            (awake,) = workers("demo_state")
            assert awake["weights"] == before["weights"]
            check_tokens(one, plain)
        call("reset_prefix_cache")
        assert call("demo_events") == [
            "pause", "reset", "sleep 1", "wake kv_cache weights", "resume",
            "pause", "reset", "sleep 2", "wake kv_cache weights", "resume", "reset",
        ]  # fmt: skip


def test_its_memory_is_planned(path: str, installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(path, dtype="bfloat16", skip_tokenizer_init=True) as one:
        resolved = one.client.resolved
    (feature,) = (each for each in enabled_features(resolved) if each.name == "demo")
    lines = feature.memory(RankLayout.of(resolved.config.parallel), 0)
    without, plan = plan_memory(resolved), plan_memory(resolved, lines=lines)
    assert plan.num_line_bytes == (3 << 20) + 5
    assert ("demo tables", "3.00 MiB in stage 0") in plan.table()
    assert plan.weights == without.weights
    more = plan_memory(resolved, feature.models())
    assert more.weights > without.weights
    huge = [lines[0]._replace(num_bytes=1 << 60)]
    asked = resolved.config.cache.__class__()
    config = replace(resolved.config, cache=asked)
    with pytest.raises(QuireError, match=r"and \d+\.\d+ GiB of demo tables.*demo_size"):
        plan_memory(replace(resolved, config=config), lines=huge)


def test_all_ranks_get_the_data_of_a_request(
    path: str, plain: list[list[int]], installed: None
) -> None:
    with split_engine(path, 2, 2, dtype="bfloat16", skip_tokenizer_init=True) as one:
        assert run(one, {})[0] == plain
        check_tokens(one, plain)
        states = one.client.core.executor.call("demo_state")
        assert [state["numbers"] for state in states] == [[6, 7], [6, 7]]
        assert states[0]["weights"] == states[1]["weights"] > 0


def test_a_stage_without_draws_has_no_further_model(
    path: str, plain: list[list[int]], installed: None
) -> None:
    with split_engine(path, 1, 2, 2, dtype="bfloat16", skip_tokenizer_init=True) as one:
        check_tokens(one, plain)
        states = one.client.core.executor.call("demo_state")
        assert [state["models"] for state in states] == [0, 1]


@pytest.mark.slow
def test_a_restarted_engine_has_its_state(
    path: str, plain: list[list[int]], installed: None
) -> None:
    """In processes: of the engine, and of 2 ranks below it."""
    config = EngineConfig.from_keywords(
        model=path, dtype="bfloat16", max_model_len=256, max_num_seqs=8, kv_cache_memory_bytes=16 << 20,
        skip_tokenizer_init=True, tensor_parallel_size=2,
    )  # fmt: skip
    client = make_client(config, process=True)
    try:
        one = Engine(client)  # type: ignore[arg-type]
        check_tokens(one, plain)
        client.call("sleep", 1)
        client.call("wake_up")
        assert client.call("demo_add", 4) == 4
        epoch = client.epoch
        os.kill(client.wait_ready().pid, signal.SIGKILL)
        while client.epoch == epoch or client.state().condition != "ready":
            with suppress(QuireError):  # the engine is replaced meanwhile
                client.call("stats")
            time.sleep(0.1)
        assert client.call("demo_add", 1) == 5
        assert client.call("demo_events") == []
        check_tokens(one, plain)
    finally:
        client.close()


def test_a_feature_may_replace_the_model_output(tmp_path: Path, installed: None) -> None:
    (tmp_path / "constant").mkdir()
    model = make_checkpoint("llama", tmp_path / "main")
    with engine(model, 2, dtype="float32", skip_tokenizer_init=True) as one:
        assert run(one, {})[0] == [[7] * COUNT] * len(ASKED)


def test_a_wrong_field_is_refused(path: str, installed: None) -> None:
    with engine(path, dtype="bfloat16", skip_tokenizer_init=True) as one:
        front = RequestManager(one.client)
        params = SamplingParams(max_tokens=3, extra_args={"demo": "x"})
        with pytest.raises(ValidationError, match="demo: must be a token"):
            front.accept([5], params, id=next(IDS))
        params = SamplingParams(max_tokens=3, extra_args={"demo": 0})
        front.submit(front.accept([5], params, id=next(IDS)))
        (collector,) = front.process_outputs(one.client.outputs())
        output = collector.take()
        assert output is not None
        assert output.outputs[0].error == "demo: 0 is not served"


def test_it_reads_items_of_prompts(path: str, installed: None) -> None:
    """In prompts and conversations of programs; the frontend asks it by route, and before the first request."""
    with engine(path, dtype="bfloat16", skip_tokenizer_init=True) as one:
        front = RequestManager(one.client)
        given = {"prompt_token_ids": [5], "multi_modal_data": {"image": [(7, 8), (9,)]}}
        assert front.accept(given, greedy(1), id="one").tokens == [5, 7, 8, 9]
        assert front.accept([5], greedy(1), id="two").tokens == [5]
        part = {"type": "image_pil", "image_pil": (7, 8)}
        messages = [{"role": "user", "content": [part]}]
        assert front.chat_prompt(messages, ChatOptions()).tokens == [7, 8]
        front.need_generation("/another")
        with pytest.raises(ValidationError, match="no such route"):
            front.need_generation("/demo")
        front.prepare()
        assert front.readers["demo"].prepared == 1
        del front.readers["demo"]
        with pytest.raises(ValidationError, match="multi_modal_data"):
            front.accept(given, greedy(1), id="three")
        with pytest.raises(ValidationError, match=r"messages\[0\]\.content\[0\]"):
            front.chat_prompt(messages, ChatOptions())


def test_two_orders_of_waiting_requests_are_refused(
    path: str, tmp_path: Path, installed: None
) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text('[{"name": "a", "key": "secret-of-a-key"}]')
    keys.chmod(0o600)
    with (
        pytest.raises(ConfigError, match="fair_share and demo both order waiting requests"),
        engine(path, dtype="bfloat16", skip_tokenizer_init=True, api_key_file=str(keys)),
    ):
        pass


def test_a_plugin_must_be_a_feature(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "[quire.features]\nbad = demo_feature:DemoGate\n")
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.syspath_prepend(str(tmp_path))
    with (
        pytest.raises(ConfigError, match=r"plugin 'bad' of the group quire\.features must name"),
        engine(path, dtype="bfloat16", skip_tokenizer_init=True),
    ):
        pass
    assert "demo_feature" in sys.modules
