"""Routers against Transformers' routers, and the sum of experts against its definition."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.errors import ConfigError
from quire.layers.moe import Router, ScaledRouter
from quire.ops.experts import ExpertWeights, Routing, experts, route

HIDDEN, TOKENS, EXPERTS = 24, 50, 12
CORRECTION = {"correction": "gate.e_score_correction_bias"}
V3 = {"score": "sigmoid", "eps": 1e-20, "scale": 2.5}
GROUPS = {"groups": 4, "top_groups": 2}


def theirs(name: str, k: int, **config: Any) -> Any:
    """A router of Transformers with random weights."""
    kind, _, name = name.partition(":")
    module = import_module(f"transformers.models.{kind}.modeling_{kind}")
    values = {
        "hidden_size": HIDDEN, "num_experts_per_tok": k, "top_k_experts": k, "rms_norm_eps": 1e-6,
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), EXPERTS),
        "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        "router_jitter_noise": 0.01, "input_jitter_noise": 0.0, "topk_method": "greedy",
        "use_expert_bias": True,
        **config,
    }  # fmt: skip
    router = getattr(module, name)(SimpleNamespace(**values)).eval()
    for tensor in (*router.parameters(), *router.buffers()):
        torch.nn.init.normal_(tensor, std=0.5)
    return router


# Transformers' class, our options, our router's keywords, values of config.json
CASES = [
    ("mixtral:MixtralTopKRouter", {}, {}, {}),
    ("qwen2_moe:Qwen2MoeTopKRouter", {"rounds": True}, {}, {}),
    (
        "qwen2_moe:Qwen2MoeTopKRouter",
        {"rounds": True, "renormalize": False},
        {},
        {"norm_topk_prob": False},
    ),
    ("jamba:JambaTopKRouter", {"renormalize": False}, {}, {}),
    ("gpt_oss:GptOssTopKRouter", {"score": "logits", "rounds": True}, {"bias": True}, {}),
    ("granitemoe:GraniteMoeTopKRouter", {"score": "logits", "rounds": True}, {}, {}),
    ("deepseek_v2:DeepseekV2TopkRouter", {"renormalize": False, "scale": 2.5}, {}, {}),
    (
        "deepseek_v2:DeepseekV2TopkRouter",
        {"renormalize": False, "scale": 2.5, "group_score": "max", **GROUPS},
        {"float32": True},
        {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    ("deepseek_v3:DeepseekV3TopkRouter", V3, CORRECTION, {}),
    (
        "deepseek_v3:DeepseekV3TopkRouter",
        {**V3, **GROUPS},
        CORRECTION,
        {"n_group": 4, "topk_group": 2},
    ),
    (
        "glm4_moe:Glm4MoeTopkRouter",
        {**V3, "renormalize": False},
        CORRECTION,
        {"norm_topk_prob": False},
    ),
    ("minimax_m2:MiniMaxM2TopKRouter", {"score": "sigmoid"}, CORRECTION, {}),
    ("lfm2_moe:Lfm2MoeTopKRouter", {**V3, "eps": 1e-6}, CORRECTION, {}),
    ("lfm2_moe:Lfm2MoeTopKRouter", {**V3, "eps": 1e-6}, {}, {"use_expert_bias": False}),
    ("phimoe:PhimoeTopKRouter", {"jitter": 0.01}, {}, {}),
    ("phimoe:PhimoeTopKRouter", {"jitter": 0.2}, {}, {"router_jitter_noise": 0.2}),
    ("gemma4:Gemma4TextRouter", {}, {}, {}),
    (
        "llama4:Llama4Router",
        {"score": "logits", "renormalize": False, "rounds": True},
        {},
        {},
    ),
]


@pytest.mark.parametrize("k", [1, 3, EXPERTS])
@pytest.mark.parametrize(("name", "options", "keywords", "config"), CASES)
def test_as_transformers(name: str, options: Any, keywords: Any, config: Any, k: int) -> None:
    if "phimoe" in name:
        k = 2
    elif options.get("groups"):
        k = min(k, EXPERTS // options["groups"] * options["top_groups"])
    torch.manual_seed(k)
    router, x_TD = theirs(name, k, **config), torch.randn(TOKENS, HIDDEN)
    correction_E = getattr(router, "e_score_correction_bias", torch.randn(EXPERTS))
    how = Routing(k, **options)
    ours: Any
    if "gemma4" in name:
        ours = ScaledRouter(HIDDEN, EXPERTS, how, 1e-6)
        ours.scale, ours.per_expert_scale = router.scale, router.per_expert_scale
        inner, weight = ours.proj, router.proj.weight
    else:
        ours = inner = Router(HIDDEN, EXPERTS, how, **keywords)
        weight = router.weight
    inner._parameters["weight"] = weight
    if keywords.get("bias"):
        inner._parameters["bias"] = router.bias
    extra = ()
    if keywords.get("correction"):
        inner._parameters["correction_E"] = torch.nn.Parameter(correction_E.data)
        extra = (correction_E,) if "minimax" in name or "lfm2" in name else ()
    with torch.no_grad():
        ids_TK, weights_TK = ours(x_TD)
        found = router(x_TD, *extra)
    if "llama4" in name:
        wanted_TE = found[0]
    else:
        wanted_TE = torch.zeros(TOKENS, EXPERTS).scatter_(1, found[2], found[1])
    assert (
        torch.zeros(TOKENS, EXPERTS).scatter_(1, ids_TK, weights_TK).sub(wanted_TE).abs().max()
        < 3e-6
    )
    assert all(len(set(ids)) == k for ids in ids_TK.tolist())


def test_groups_whose_scores_are_all_negative() -> None:
    """With "top2", an expert of another group is never chosen; with "max", those have a score of zero."""
    scores = torch.tensor([[-9.0, -9.0, -8.0, -8.0, 5.0, -7.0]])
    correction_E = torch.tensor([0.0, 0.0, 0.0, 0.0, -5.0, -5.0])
    how = Routing(2, "sigmoid", groups=3, top_groups=1)
    assert route(scores, correction_E, how)[0].tolist() == [[2, 3]]
    how = Routing(2, "logits", groups=3, top_groups=1, group_score="max")
    assert route(torch.tensor([[-2.0, -1.0, -4.0, -5.0]]), None, how._replace(groups=2))[
        0
    ].tolist() == [[2, 3]]


def test_the_lower_number_wins_a_tie() -> None:
    logits = torch.zeros(3, 200)
    logits[1, 150] = 1
    for score in ("softmax", "sigmoid", "logits"):
        ids = route(logits, None, Routing(4, score))[0].tolist()
        assert ids == [[0, 1, 2, 3], [150, 0, 1, 2], [0, 1, 2, 3]]
    assert route(logits, None, Routing(2, jitter=0.01))[0].tolist() == [[0, 1], [150, 0], [0, 1]]


@pytest.mark.parametrize(
    "how", [Routing(0), Routing(7), Routing(3, groups=3), Routing(1, groups=4)]
)
def test_impossible_choices_are_refused(how: Routing) -> None:
    with pytest.raises(ConfigError, match=rf"cannot have {how.k} of 6 experts"):
        Router(HIDDEN, 6, how)


class Times:
    """A weight whose product is not linear in the number of the expert."""

    def __init__(self, factor: float):
        self.factor, self.calls = factor, 0

    def multiply(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.factor + 1


def test_experts_are_summed_in_float32_in_the_routers_order() -> None:
    x_TD = torch.randn(5, 8).bfloat16()
    up, down = [Times(e) for e in range(4)], [Times(0.5 * e) for e in range(4)]
    of = ExpertWeights(up, down, "relu2")
    ids_TK = torch.tensor([[0, 1, 2], [2, 1, 0], [1, 2, 0], [0, 2, 1], [2, 0, 9]])
    weights_TK = torch.rand(5, 3)
    wanted = torch.zeros(5, 8)
    for t in range(5):
        for e, weight in zip(ids_TK[t].tolist(), weights_TK[t], strict=True):
            if e < 4:
                inner = (x_TD[t] * e + 1).relu().square()
                wanted[t] += (inner * (0.5 * e) + 1).float() * weight
    assert torch.equal(experts(x_TD, ids_TK, weights_TK, of), wanted.bfloat16())
    assert up[3].calls == 0  # an expert that no token chose
    alone = [
        experts(x_TD[t : t + 1], ids_TK[t : t + 1], weights_TK[t : t + 1], of) for t in range(5)
    ]
    assert torch.equal(torch.cat(alone), wanted.bfloat16())
