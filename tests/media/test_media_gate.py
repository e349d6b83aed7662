"""The gate of pictures: how many rows of the tower a step may compute, and which requests it refuses. And what a row needs."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
import torch

from quire.errors import ValidationError
from quire.features.media.encoder_cache import EncoderCache
from quire.features.media.gate import MediaGate
from quire.features.media.hook import PlacedItem, tokens_in
from quire.features.media.positions import item_positions
from quire.protocol.media import IMAGE, TowerInput
from quire.protocol.request import EngineRequest, MediaItem
from quire.protocol.sampling_params import SamplingParams
from quire.scheduler.request import Request


def received(*places: tuple[int, int], length: int = 100, kind: str = IMAGE) -> EngineRequest:
    media = [MediaItem(str(at), kind, *place) for at, place in enumerate(places)]
    return EngineRequest("a", [1] * length, SamplingParams(max_tokens=4), media=media)


def request(*places: tuple[int, int]) -> Request:
    return Request.of(received(*places), 1, b"", by_priority=False)


def gate(budget: int = 20, whole: int = 0) -> MediaGate:
    made = MediaGate(budget, whole, defaultdict(float))
    made.begin([])
    return made


def test_pictures_of_a_step_share_the_budget():
    first, second = request((0, 12), (30, 6)), request((5, 8))
    limit = gate()
    assert limit.allow(first, 0, 50) == 50  # 18 of 20 rows
    assert limit.allow(second, 0, 50) == 5  # up to its picture
    limit.begin([])
    assert limit.allow(second, 5, 50) == 50


def test_a_chunk_ends_before_the_picture_that_does_not_fit():
    limit = gate()
    assert limit.allow(request((0, 12), (30, 12)), 0, 50) == 30
    limit.begin([])
    assert limit.allow(request((0, 12), (30, 12)), 12, 50) == 50  # the first is computed


def test_the_largest_picture_is_encoded_alone():
    limit = gate()
    assert limit.allow(request((10, 20)), 0, 50) == 50
    assert limit.allow(request((0, 1)), 0, 50) == 0
    assert limit.allow(request(), 0, 50) == 50


def test_whole_pictures():
    limit = gate(whole=20)
    assert limit.allow(request((10, 20)), 0, 15) == 10
    assert limit.allow(request((10, 20)), 10, 15) == 0
    assert limit.allow(request((10, 20)), 10, 20) == 20


def prompts_of(window: int = 0) -> MediaGate:
    """A gate of a model whose prompts with pictures attend in both directions, in steps of 120 tokens."""
    made = MediaGate(120, 120, defaultdict(float), True, window)
    made.begin([])
    return made


def test_whole_prompts():
    limit = prompts_of()
    assert limit.allow(request((0, 12)), 0, 99) == 0
    assert limit.allow(request((0, 12)), 48, 51) == 0  # the rest after a prefix hit
    assert limit.allow(request((0, 12)), 48, 52) == 52
    assert limit.allow(request((0, 12)), 100, 1) == 1
    assert limit.allow(request(), 0, 30) == 30  # text only
    assert limit.allow(request((0, 60), (60, 40)), 0, 100) == 100
    assert limit.allow(request((0, 60)), 0, 100) == 0  # the pictures of a step share its budget


def test_a_whole_prompt_shares_blocks_with_equal_prompts_only():
    limit = prompts_of()
    salts = [limit.receive(one, 1).salt for one in (received((0, 9)), received((0, 9)), received((1, 9)), received((0, 9), length=99))]  # fmt: skip
    assert salts[0] == salts[1]
    assert len({*salts, ""}) == 4
    assert limit.receive(received(), 1).salt == ""
    with pytest.raises(ValidationError, match=r"121 tokens, a step at most 120 \(--max-num-batched-tokens\)"):  # fmt: skip
        limit.receive(received((0, 9), length=121), 1)
    reads = [prompts_of(window).receive(received((0, 9)), 1).params.skip_reading_prefix_cache for window in (99, 100)]  # fmt: skip
    assert reads == [True, None]


@pytest.mark.parametrize("places", [[(0, 21)], [(0, 10), (5, 10)], [(95, 10)], [(3, 0)]], ids=str)
def test_places_that_cannot_be_are_refused(places):
    with pytest.raises(ValidationError, match="item"):
        gate().receive(received(*places), 1)


def test_other_media_have_no_limit_here():
    other = received((0, 90), kind="embeddings:float32")
    assert gate().receive(other, 1) is other


# -- the hook's arithmetic ------------------------------------------------------------------------
def test_which_tokens_take_which_rows():
    """Tokens 12, 13 and 16 of the row, at every cut of a chunk."""
    placed = PlacedItem("a", IMAGE, 10, 18, TowerInput([(2, 2), (6, 1)], [], {}))
    expected = {12: 0, 13: 1, 16: 2}
    for start in range(8, 20):
        for end in range(start, 21):
            places, rows = tokens_in(placed, start, end)
            found = dict(zip(places.tolist(), rows.tolist(), strict=True))
            assert found == {t: row for t, row in expected.items() if start <= t < end}


def test_positions_of_a_grid():
    """Two text tokens, 2 x 3 rows, one text token, 1 x 2 rows: the positions of Qwen2-VL."""
    first, second = TowerInput([(0, 6)], [(1, 2, 3)], {}), TowerInput([(0, 2)], [(1, 1, 2)], {})
    positions_LC, offset = item_positions([(2, first), (9, second)])
    time, height, width = positions_LC.T.tolist()
    assert time == [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 6]
    assert height == [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 6]
    assert width == [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7]
    assert offset == 8 - 11


def test_the_encoder_cache_keeps_the_last_used_rows():
    cache = EncoderCache(10)
    for name, rows in (("a", 4), ("b", 4)):
        cache.put(name, torch.zeros(rows, 2))
    assert cache.get("a") is not None
    cache.put("c", torch.zeros(4, 2))
    assert (cache.get("b"), cache.num_rows) == (None, 8)
    cache.put("large", torch.zeros(30, 2))
    assert (cache.get("a"), cache.num_rows) == (None, 30)
    assert len(np.asarray(cache.get("large"))) == 30
