from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from equality import engines

from quire.features.kv_tiers import rates

MLA = {
    "kv_lora_rank": 32, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "num_key_value_heads": 4, "n_group": 1, "topk_group": 1,
}  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {
    "deepseek_v2": MLA,
    "wide": {"head_dim": 32, "intermediate_size": 128, "tie_word_embeddings": False},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
KINDS = {"wide": "qwen3"}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Path of the tiny checkpoint of a kind, made once."""
    made: dict[str, str] = {}

    def get(kind: str) -> str:
        if kind not in made:
            of, sizes = KINDS.get(kind, kind), SIZES.get(kind, {})
            made[kind] = engines.make_checkpoint(of, tmp_path_factory.mktemp(kind), **sizes)
        return made[kind]

    return get


@pytest.fixture(autouse=True)
def short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is enough for a load, loads are always taken to be faster, and none is late on a machine that does other work."""
    monkeypatch.setattr(rates, "FEWEST_TOKENS", 1)
    monkeypatch.setattr(rates, "GRACE_S", 30.0)
    monkeypatch.setattr(rates.TierRates, "finished", lambda self, step, result: None)
