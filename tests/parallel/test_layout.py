"""Which rank has which part, and which layers a stage has."""

from __future__ import annotations

import pytest

from quire.config.engine import EngineConfig
from quire.errors import ConfigError
from quire.parallel.layout import RankLayout, RankPlace
from quire.parallel.rank_address import addresses, memory_bytes
from quire.parallel.regions import num_bytes


def test_places_and_groups() -> None:
    layout = RankLayout(pipeline=2, prefill=2, tensor=3)
    assert layout.size == 12
    assert [layout.place(rank) for rank in (0, 1, 3, 6, 11)] == [
        *(RankPlace(0, 0, 0), RankPlace(0, 0, 1), RankPlace(0, 1, 0), RankPlace(1, 0, 0), RankPlace(1, 1, 2)),
    ]  # fmt: skip
    assert [layout.rank(layout.place(rank)) for rank in range(12)] == list(range(12))
    assert layout.tensor_group(4) == [3, 4, 5]
    assert layout.context_group(4) == [1, 4]
    assert layout.stage_group(10) == [4, 10]
    assert layout.answering == [6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize(
    ("stages", "total", "wanted"),
    [(1, 5, [5]), (2, 4, [2, 2]), (2, 5, [3, 2]), (3, 8, [3, 3, 2]), (3, 7, [2, 3, 2]), (4, 4, [1] * 4)],
)  # fmt: skip
def test_what_remains_goes_before_the_last_stage(
    stages: int, total: int, wanted: list[int]
) -> None:
    found = [RankLayout(stages).layers(stage, total) for stage in range(stages)]
    assert [len(layers) for layers in found] == wanted
    assert [layer for layers in found for layer in layers] == list(range(total))


@pytest.mark.parametrize("name", ["QUIRE_PP_LAYER_PARTITION", "VLLM_PP_LAYER_PARTITION"])
def test_a_partition_is_chosen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1,3")
    layout = RankLayout.of(EngineConfig.from_keywords(pipeline_parallel_size=2).parallel)
    assert [layout.layers(stage, 4) for stage in (0, 1)] == [range(1), range(1, 4)]
    with pytest.raises(ConfigError, match="PARTITION=1,3 has 4 layers, and the model has 6"):
        layout.layers(0, 6)
    with pytest.raises(ConfigError, match="pipeline_parallel_size=2 is more than the 1 layers"):
        layout.layers(0, 1)


@pytest.mark.parametrize("text", ["1,2,3", "1", "1,x", "0,4"])
def test_a_partition_for_other_stages_is_refused(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_PP_LAYER_PARTITION", text)
    with pytest.raises(ConfigError, match="needs 2 numbers of layers"):
        RankLayout.of(EngineConfig.from_keywords(pipeline_parallel_size=2).parallel)
    assert RankLayout.of(EngineConfig().parallel).partition == ()


def test_each_rank_inherits_what_it_uses() -> None:
    layout = RankLayout(pipeline=3, tensor=2)
    with addresses(layout) as found:
        assert memory_bytes(layout) == 3 * num_bytes(2)
        assert [len(each.sockets.others) for each in found] == [1, 1, 1, 1, 2, 2]
        assert [each.sockets.previous >= 0 for each in found] == [False] * 2 + [True] * 4
        assert [each.sockets.next >= 0 for each in found] == [True] * 4 + [False] * 2
        sockets = [fd for each in found for fd in each.fds if fd != each.fd]
        assert len(set(sockets)) == len(sockets) == 16
    with addresses(RankLayout(pipeline=2)) as found:
        assert found[0].fd == -1
