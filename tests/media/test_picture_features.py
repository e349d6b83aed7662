"""Pictures beside other features: adapters of the language model, structured output, speculation; each computes what it computes alone."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from test_picture_equality import COUNT, GREEDY, given, processor, prompt_of, tokens
from vision_checkpoints import picture, transformers_model

from quire import LoRARequest, SamplingParams

TEXT = "see @ and @ here"
LANGUAGE = r".*language_model.*\.(q_proj|v_proj|up_proj|down_proj)"
SLOW = pytest.mark.slow


def adapter(path: str, targets: str, folder: Path) -> Any:
    """PEFT's model with a random adapter, which is also in the folder."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = peft.get_peft_model(copy.deepcopy(transformers_model(path)), config)
    model.save_pretrained(folder)
    return model.eval()


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["llava", pytest.param("qwen2_vl", marks=SLOW)])
def test_an_adapter_computes_what_peft_computes(kind, engine, checkpoint, tmp_path):
    path, pictures = checkpoint(kind), [picture(1, width=150, height=90), picture(2)]
    model = adapter(path, LANGUAGE, tmp_path)
    inputs = processor(path)(images=pictures, text=[prompt_of(kind, TEXT)], return_tensors="pt", add_special_tokens=False)  # fmt: skip
    with torch.inference_mode():
        out = model.generate(**inputs, max_new_tokens=COUNT, do_sample=False, eos_token_id=None, pad_token_id=0)  # fmt: skip
    expected = out[0, inputs["input_ids"].shape[1] :].tolist()
    prompt, request = given(kind, TEXT, pictures), LoRARequest("own", 1, str(tmp_path))
    with engine(kind, enable_lora=True, max_lora_rank=8) as llm:
        plain = tokens(llm, prompt)[0]
        for _ in range(2):  # the second finds the prefix cache
            (found,) = llm.generate([prompt], GREEDY, use_tqdm=False, lora_request=request)
            assert list(found.outputs[0].token_ids) == expected != plain
        assert tokens(llm, prompt)[0] == plain


def test_structured_output_and_speculation_give_the_same_tokens(engine):
    """A constraint and guessed tokens, each alone and both together."""
    form = {"structured_outputs": {"regex": "(see|here|and){3,9}"}}
    prompt = given("llava", "see @ see see see here see", [picture(1)])
    guess = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    params = [SamplingParams(temperature=t, seed=5, max_tokens=COUNT, **more) for t in (0, 1.0) for more in ({}, form)]  # fmt: skip
    with engine("llava") as llm:
        expected = [tokens(llm, prompt, params=one)[0] for one in params]
    with engine("llava", speculative_config=guess) as llm:
        assert [tokens(llm, prompt, params=one)[0] for one in params] == expected
    for one, plain in ((1, 0), (3, 2)):
        assert expected[one] != expected[plain]
