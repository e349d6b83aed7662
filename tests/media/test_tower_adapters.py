"""LoRA adapters of vision towers and projectors: the tokens of PEFT, in company, cached and not; rows of one never serve another."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_picture_equality import COUNT, given, passes, processor, prompt_of
from vision_checkpoints import picture, transformers_model

from quire import LoRARequest, SamplingParams
from quire.errors import ValidationError
from quire.features.lora.memory import forecast_adapters
from quire.parallel.layout import RankLayout

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
TEXT = "see @ and @ here"
PARAMS = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, logprobs=2)
PICTURES = [picture(1, width=150, height=90), picture(2)]
LANGUAGE = r".*language_model.*\.(q_proj|down_proj)"
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llava": (r".*\.(q_proj|v_proj|out_proj|fc1|fc2|linear_1|linear_2|patch_embedding)", {}),
    "llava_onevision": (r".*\.(q_proj|fc1|fc2|linear_2|patch_embedding)", {"use_rslora": True}),
    "qwen2_5_vl": (r".*\.(qkv|attn\.proj|gate_proj|down_proj|mlp\.0|mlp\.2|patch_embed\.proj)", {}),
    "qwen2_5_vl with DoRA": (r".*\.(qkv|gate_proj|up_proj|down_proj|mlp\.0)", {"use_dora": True}),
    "mistral3": (r".*\.(q_proj|down_proj|merging_layer|linear_2|patch_conv)", {"bias": "all"}),
    "idefics3": (r".*\.(q_proj|fc2|up_proj|modality_projection\.proj)", {}),
    "internvl": (r".*\.(q_proj|fc1|linear_1|linear_2|projection_layer)", {}),
}
"""By kind of checkpoint: which modules have adapters, and how. The tower of the last one runs through Transformers."""


def adapter(path: str, targets: str, folder: Path, seed: int, **options: Any) -> Any:
    """PEFT's model with a random adapter, which is also in the folder."""
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False, **options)  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = peft.get_peft_model(copy.deepcopy(transformers_model(path)), config)
        if options.get("bias") == "all":
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.data += torch.randn_like(parameter) / 10
    model.save_pretrained(folder)
    return model.eval()


@torch.inference_mode()
def by_transformers(model: Any, path: str, kind: str) -> list[int]:
    inputs = processor(path)(images=PICTURES, text=[prompt_of(kind, TEXT)], return_tensors="pt", add_special_tokens=False)  # fmt: skip
    out = model.generate(**inputs, max_new_tokens=COUNT, do_sample=False, eos_token_id=None, pad_token_id=0)  # fmt: skip
    found: list[int] = out[0, inputs["input_ids"].shape[1] :].tolist()
    return found


Answer = tuple[list[int], list[dict[int, float]]]


def answers(llm: Any, kind: str, *adapters: LoRARequest | None) -> list[Answer]:
    """Tokens and log-probabilities of the same prompt with each adapter, in one batch."""
    prompts = [given(kind, TEXT, PICTURES) for _ in adapters]
    outs = llm.generate(prompts, PARAMS, use_tqdm=False, lora_request=list(adapters))
    firsts = [one.outputs[0] for one in outs]
    return [
        (list(first.token_ids), [{t: e.logprob for t, e in entry.items()} for entry in first.logprobs])
        for first in firsts
    ]  # fmt: skip


def empty(llm: Any) -> None:
    llm.reset_prefix_cache()
    llm.reset_encoder_cache()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
def test_two_adapters_and_the_base_in_one_batch(
    case: str, engine: Callable[..., Any], checkpoint: Callable[[str], str], tmp_path: Path
) -> None:
    kind, (targets, options) = case.partition(" ")[0], CASES[case]
    path = checkpoint(kind)
    models = [adapter(path, targets, tmp_path / name, seed, **options) for seed, name in enumerate("ab")]  # fmt: skip
    expected = [by_transformers(model, path, kind) for model in (transformers_model(path), *models)]
    assert len({str(one) for one in expected}) == 3
    requests = [None, *(LoRARequest(f"{case} {name}", 1, str(tmp_path / name)) for name in "ab")]
    with engine(
        kind, enable_lora=True, max_loras=2, max_lora_rank=8, max_num_batched_tokens=512
    ) as llm:
        together = answers(llm, kind, *requests)
        assert [tokens for tokens, _ in together] == expected
        assert passes(llm) == 3 * len(PICTURES)
        for which in (
            slice(None),
            slice(None, None, -1),
        ):  # of the prefix cache, then of the encoder's
            assert answers(llm, kind, *requests[which]) == together[which]
            llm.reset_prefix_cache()
        assert passes(llm) == 3 * len(PICTURES)
        for request, alone in zip(requests, together, strict=True):
            empty(llm)
            assert answers(llm, kind, request) == [alone]


def test_an_adapter_of_the_language_model_shares_rows_with_the_base(engine, checkpoint, tmp_path):
    adapter(checkpoint("llava"), LANGUAGE, tmp_path, 7)
    with engine("llava", enable_lora=True, max_loras=2, max_lora_rank=8) as llm:
        base, other = answers(llm, "llava", None, LoRARequest("words", 1, str(tmp_path)))
        assert base != other
        assert passes(llm) == len(PICTURES)


def test_a_reload_in_place_never_answers_from_old_rows(engine, checkpoint, tmp_path):
    path, targets = checkpoint("llava"), r".*\.linear_1"
    first, second = (adapter(path, targets, tmp_path, seed) for seed in (11, 12))
    expected = [by_transformers(model, path, "llava") for model in (first, second)]
    first.save_pretrained(tmp_path)
    with engine("llava", enable_lora=True, max_loras=2, max_lora_rank=8) as llm:
        given_path = str(tmp_path)
        assert answers(llm, "llava", LoRARequest("one", 1, given_path))[0][0] == expected[0]
        second.save_pretrained(tmp_path)
        request = LoRARequest("one", 1, given_path, load_inplace=True)
        assert answers(llm, "llava", request)[0][0] == expected[1] != expected[0]


@pytest.mark.parametrize(
    ("targets", "options"),
    [
        (r".*position_embedding", {}),
        (r".*(fc1|linear_1)", {"language_model_only": True}),
    ],
)
def test_what_a_tower_cannot_do_is_refused_by_name(targets, options, engine, checkpoint, tmp_path):
    adapter(checkpoint("llava"), targets, tmp_path, 1)
    request = LoRARequest("refused", 2, str(tmp_path))
    words = pytest.raises(
        ValidationError, match=r"modules of a vision or audio tower.*(position_embedding|fc1)"
    )
    with engine("llava", enable_lora=True, max_loras=2, max_lora_rank=8, **options) as llm, words:
        llm.generate(["<s>"], PARAMS, use_tqdm=False, lora_request=request)


def test_the_memory_plan_counts_the_factors_of_the_tower(engine, checkpoint, tmp_path):
    adapter(checkpoint("llava"), r".*\.(q_proj|k_proj|v_proj|out_proj|o_proj|fc1|fc2|linear_1|linear_2|gate_proj|up_proj|down_proj|patch_embedding)", tmp_path, 5)  # fmt: skip
    with engine("llava", enable_lora=True, max_loras=1, max_lora_rank=4) as llm:
        answers(llm, "llava", LoRARequest("all", 1, str(tmp_path)))
        core = llm.front.client.core
        (weights,) = core.executor.worker.model.adapters.loaded
        planned = forecast_adapters(llm.front.client.resolved, RankLayout.of(llm.front.client.resolved.config.parallel), 0)  # fmt: skip
    assert (
        abs(planned.num_bytes - weights.num_bytes) < 0.02 * weights.num_bytes
    )  # scales, one number for each rank
