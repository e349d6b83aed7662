"""The cache layout and the memory plan, checked by hand-made sums."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire.config.engine import EngineConfig, Resolved
from quire.config.speculation import SpeculativeOptions
from quire.errors import NotEnoughMemory
from quire.kvcache.layout import layout
from quire.kvcache.specs import CacheSpec, WindowSpec
from quire.worker.memory_forecast import forecast_weights, specs_of
from quire.worker.memory_plan import MemoryPlan, activation_bytes, make_plan, size

FULL = CacheSpec(2, 8, 8, "bfloat16")  # 64 bytes a token
NARROW = WindowSpec(2, 8, 8, "bfloat16", window=32)
CONFIG = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "intermediate_size": 64,
    "vocab_size": 100,
}


def resolved(**cache: object) -> Resolved:
    return Resolved(
        config=EngineConfig.from_keywords(**cache),
        path="",
        hf_config=CONFIG,
        architecture="X",
        dtype="bfloat16",
        device="cpu",
        max_model_len=256,
        auto_max_model_len=False,
        block_size=16,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        chunked_prefill=True,
        prefix_caching=True,
        depth=1,
        executor="uni",
    )


def test_one_kind_of_layer_is_one_group() -> None:
    cut = layout([FULL] * 5, 16, 4096)
    assert [group.layers for group in cut.groups] == [(0, 1, 2, 3, 4)]
    assert cut.bytes_per_block == 5 * 64 * 16
    assert cut.blocks_for(33, 16) == 3


def test_layers_of_different_shapes_can_share_a_group() -> None:
    """So a draft model of one layer costs the bytes of that layer, and no block table."""
    draft = CacheSpec(1, 32, 32, "bfloat16")
    cut = layout([FULL] * 5 + [draft], 16, 4096)
    assert [group.layers for group in cut.groups] == [(0, 1, 2, 3, 4, 5)]
    assert cut.bytes_per_block == (5 * FULL.bytes_per_token + draft.bytes_per_token) * 16
    mixed = layout([FULL, draft, NARROW] * 2 + [FULL, draft], 16, 4096)
    assert [group.layers for group in mixed.groups] == [(0, 1), (3, 4), (6, 7), (2, 5)]


def test_kinds_are_cut_into_groups_of_equal_size() -> None:
    specs = [FULL if i % 6 == 5 else NARROW for i in range(12)]  # 2 full, 10 narrow
    cut = layout(specs, 16, 4096)
    assert cut.groups[0].spec == FULL
    assert [len(group.layers) for group in cut.groups] == [2] * 6
    assert sorted(layer for group in cut.groups for layer in group.layers) == list(range(12))
    assert cut.bytes_per_block == 2 * 64 * 16
    # 4096 tokens: 256 blocks in the full group; (32 + 64) / 16 + 1 in each of the five others
    assert cut.blocks_for(4096, 64) == 256 + 5 * 7


def test_tokens_that_fit_are_those_of_all_groups() -> None:
    specs = [FULL if i % 6 == 5 else NARROW for i in range(12)]
    cut = layout(specs, 16, 4096)
    assert cut.tokens_in(2 * (256 + 5 * 7), 4096, 64) == 2 * 4096
    assert layout([NARROW], 16, 4096).tokens_in(7, 4096, 64) == 4096  # a window frees blocks
    assert layout([FULL], 16, 4096).tokens_in(10, 4096, 64) == 160


def test_layers_of_other_sizes_have_storage_of_their_own() -> None:
    wide = CacheSpec(2, 16, 16, "bfloat16")
    cut = layout([wide, NARROW, NARROW, wide, NARROW, NARROW], 16, 4096)
    assert [len(group.layers) for group in cut.groups] == [2, 2, 2]
    assert cut.bytes_per_block == 16 * (2 * 128 + 2 * 64)


def test_a_window_that_no_request_outgrows_is_full_attention() -> None:
    assert len(layout([FULL, NARROW], 16, 32).groups) == 1


def test_the_forecast_reads_heads_sizes_and_windows() -> None:
    assert specs_of(CONFIG, "bfloat16") == [FULL] * 3
    windows = {
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }
    assert specs_of(CONFIG | windows, "bfloat16") == [NARROW, FULL, NARROW]
    assert specs_of(CONFIG | {"head_dim": 16}, "float32")[0].bytes_per_token == 2 * 32 * 4


def test_remaining_memory_becomes_blocks() -> None:
    asked = resolved(kv_cache_memory_bytes=3 * 64 * 16 * 41)
    plan = make_plan(asked, 1000, 1 << 30, 1 << 30, [FULL] * 3)
    assert (plan.num_blocks, plan.max_model_len, plan.max_requests) == (40, 256, 2)
    assert plan.kv == 3 * 64 * 16 * 41


@pytest.mark.parametrize(("caching", "blocks"), [(True, 400), (False, 4 * 16)])
def test_a_cache_of_the_users_size_holds_prefixes_beside_all_requests(caching: bool, blocks: int) -> None:  # fmt: skip
    asked = replace(resolved(kv_cache_memory_bytes=3 * 64 * 16 * 401), prefix_caching=caching)
    plan = make_plan(asked, 1000, 1 << 30, 1 << 30, [FULL] * 3)
    assert (plan.num_blocks, plan.max_num_seqs * plan.max_model_len) == (blocks, 4 * 256)


STATE = 64 * 1000


def with_states(rows: int | None, room: int, specs=(FULL,) * 3, **cache: object):
    asked = resolved(kv_cache_memory_bytes=room, max_num_seqs=rows, **cache)
    caching = cache.get("enable_prefix_caching") is not False
    asked = replace(asked, max_num_seqs=rows or 256, prefix_caching=caching)
    return make_plan(asked, 1000, 1 << 40, 1 << 40, list(specs), state_bytes=STATE)


def test_states_are_taken_from_the_cache_before_blocks() -> None:
    block = 3 * 64 * 16
    plan = with_states(4, 5 * STATE + 41 * block)
    assert (plan.states, plan.num_blocks, plan.max_num_seqs) == (5 * STATE, 40, 4)
    assert (
        "recurrent states",
        "312.50 KiB = 62.50 KiB for each of 4 + 1 rows and 0 checkpoints (no prefix caching)",
    ) in plan.table()


def test_states_that_do_not_fit_name_the_largest_max_num_seqs() -> None:
    block = 3 * 64 * 16
    for rows in (5, 100):
        with pytest.raises(NotEnoughMemory, match=r"Set max_num_seqs=4 or less") as caught:
            with_states(rows, 5 * STATE + 17 * block)  # one request of 256 tokens has 16 blocks
        assert f"max_num_seqs={rows} requests need {size((rows + 1) * STATE)}" in str(caught.value)
    assert with_states(4, 5 * STATE + 17 * block).num_blocks == 16
    with pytest.raises(NotEnoughMemory, match="smaller model"):
        with_states(1, STATE + 17 * block)


def test_each_row_has_states_behind_its_draft_tokens() -> None:
    block = 3 * 64 * 16
    asked = resolved(kv_cache_memory_bytes=17 * STATE + 41 * block, max_num_seqs=4)
    drafts = SpeculativeOptions(method="ngram", num_speculative_tokens=3)
    asked = replace(asked, max_num_seqs=4, prefix_caching=False, speculation=drafts)

    def plan_of(state_bytes: int) -> MemoryPlan:
        return make_plan(asked, 1000, 1 << 40, 1 << 40, [FULL] * 3, state_bytes=state_bytes)

    plan = plan_of(STATE)
    assert (plan.num_drafts, plan.states, plan.num_blocks) == (3, 17 * STATE, 40)
    assert "3 for the draft tokens of a row" in dict(plan.table())["recurrent states"]
    with pytest.raises(NotEnoughMemory, match=r"Set max_num_seqs=3 or less"):
        plan_of(STATE + 3 * block)
    assert plan_of(0).num_drafts == 0


def test_an_eighth_of_the_cache_keeps_checkpoints_for_prefix_caching() -> None:
    left = 24 * STATE + 100
    plan = with_states(4, 5 * STATE + left)
    assert plan.num_checkpoints == 3
    assert plan.states == (5 + 3) * STATE
    few = with_states(4, 5 * STATE + left, [replace(FULL, num_kv_heads=30)] * 3)
    assert few.num_blocks == (left - 3 * STATE) // (3 * 15 * 64 * 16) - 1
    for off in ({"mamba_cache_mode": "none"}, {"enable_prefix_caching": False}):
        assert with_states(4, 5 * STATE + left, **off).num_checkpoints == 0


def test_an_open_max_num_seqs_leaves_half_of_the_cache_to_keys_and_values() -> None:
    assert with_states(None, 20 * STATE).max_num_seqs == 9
    assert with_states(None, 2000 * STATE).max_num_seqs == 256


def test_a_model_without_attention_has_blocks_that_cost_nothing() -> None:
    plan = with_states(4, 5 * STATE, ())
    assert (plan.kv, plan.num_blocks, plan.max_requests) == (0, 4 * 16, 4)
    assert plan.layout.groups[0].layers == ()
    assert ("KV cache", "none: no layer keeps keys and values") in plan.table()
    with pytest.raises(NotEnoughMemory, match=r"Set max_num_seqs=3 or less"):
        with_states(4, 5 * STATE - 1, ())


def test_never_more_than_the_rows_can_use() -> None:
    plan = make_plan(resolved(), 1000, 1 << 30, 1 << 30, [FULL] * 3)
    assert plan.num_blocks == 4 * 256 // 16


def test_the_share_covers_weights_activations_and_cache() -> None:
    asked = resolved(gpu_memory_utilization=0.5)
    weights, blocks = 5_000_000, 30
    available = 2 * (
        weights + activation_bytes(asked.spec, asked.max_num_seqs) + (blocks + 1) * 3 * 64 * 16
    )
    assert make_plan(asked, weights, 1 << 30, available, [FULL] * 3).num_blocks == blocks


def test_too_little_memory_names_the_numbers_and_the_flag() -> None:
    asked = resolved(kv_cache_memory_bytes=3 * 64 * 16 * 11)
    with pytest.raises(NotEnoughMemory, match=r"max_model_len=160 or less") as caught:
        make_plan(asked, 1000, 1 << 30, 1 << 30, [FULL] * 3)
    assert size(3 * 64 * 16 * 17) in str(caught.value)
    with pytest.raises(NotEnoughMemory, match="weights alone do not fit: use a smaller"):
        make_plan(resolved(), 2 << 30, 1 << 30, 1 << 30, [FULL] * 3)


def test_auto_uses_the_longest_context_that_fits() -> None:
    asked = replace(resolved(kv_cache_memory_bytes=3 * 64 * 16 * 11), auto_max_model_len=True)
    plan = make_plan(asked, 1000, 1 << 30, 1 << 30, [FULL] * 3)
    assert (plan.max_model_len, plan.num_blocks) == (160, 10)


def test_an_override_is_not_changed() -> None:
    plan = make_plan(resolved(num_gpu_blocks_override=7), 1000, 1 << 30, 1 << 30, [FULL] * 3)
    assert (plan.num_blocks, plan.max_model_len) == (7, 256)


def test_a_too_small_cache_setting_is_named_in_the_error() -> None:
    for blocks, remedy in ((1, "Raise kv_cache_memory_bytes"), (5, "Set max_model_len=64 or less")):
        asked = resolved(kv_cache_memory_bytes=3 * 64 * 16 * blocks)
        with pytest.raises(NotEnoughMemory, match=remedy) as caught:
            make_plan(asked, 1000, 1 << 30, 1 << 30, [FULL] * 3)
        assert "kv_cache_memory_bytes=" in str(caught.value)


def test_quantized_weights_are_counted_small_and_must_fit_unquantized() -> None:
    found = [
        ("a.weight", "F32", (100, 64)),
        ("a.bias", "F32", (100,)),
        ("embed.weight", "F16", (10, 64)),
    ]
    plain = resolved()
    assert forecast_weights(plain.spec, plain.device, 0, found) == 2 * (6400 + 100 + 640)
    small = replace(plain, quantization="int8")
    assert (
        forecast_weights(small.spec, small.device, 20_000, found) == 6400 + 2 * 100 + 2 * 640 + 640
    )
    packed = [("a.qweight", "I32", (8, 100)), ("a.scales", "F16", (1, 100))]
    assert forecast_weights(plain.spec, plain.device, 0, packed) == 4 * 800 + 2 * 100
    with pytest.raises(NotEnoughMemory, match=r"quantizing to int8 .* as bfloat16, .*13\.95 KiB"):
        forecast_weights(small.spec, small.device, 14_000, found)
    # A CUDA device quantizes them one by one and keeps the head: the embedding table, or its own.
    away = replace(small, device="cuda", quantization="fp8")
    assert forecast_weights(away.spec, away.device, 14_000, found) == 6400 + 2 * 100 + 2 * 640
    found.append(("lm_head.weight", "BF16", (10, 64)))
    assert (
        forecast_weights(away.spec, away.device, 14_000, found)
        == 6400 + 2 * 100 + 2 * 640 + 2 * 640
    )


def test_a_cache_larger_than_the_machine_is_refused_or_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    requested, total = 1000 << 30, 1 << 30
    with caplog.at_level("WARNING", "quire"):
        plan = make_plan(resolved(kv_cache_memory_bytes=requested), 1000, total, total, [FULL] * 3)
    assert plan.num_blocks == 4 * 256 // 16  # what the requests can use
    assert f"kv_cache_memory_bytes={requested} is more than the machine's 1.00 GiB: " in caplog.text
    many = replace(resolved(kv_cache_memory_bytes=requested), max_num_seqs=100_000)
    left = total - 1000 - activation_bytes(many.spec, many.max_num_seqs)
    with pytest.raises(
        NotEnoughMemory, match=f"does not fit .* Use at most {left}, or leave it out"
    ):
        make_plan(many, 1000, total, total, [FULL] * 3)
