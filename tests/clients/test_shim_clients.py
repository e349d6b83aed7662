"""Programs that run vLLM in their own process, over the shim: the evaluation harness, langchain, outlines."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from client_runs import command, need

MODEL = Path(__file__).parents[2] / "src" / "quire" / "embedded" / "quire-tiny"
QUESTIONS = [
    {"q": "Once upon a time there was a little", "choices": [" girl", " dog named Max", " xqz"]},
    {"q": "Tom wanted to play with his", "choices": [" friend", " toys and", " zzz"]},
]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{text}"
doc_to_target: {target}
{more}
"""
CHOICES = 'doc_to_choice: "{{choices}}"\ntarget_delimiter: ""\nmetric_list: [{metric: acc}]'
GENERATE = "generation_kwargs: {until: ['.'], max_gen_toks: 12, do_sample: false}\nmetric_list: [{metric: exact_match}]"


def tasks(folder: Path) -> None:
    """Tasks whose data are on this disk: the harness needs no network for them."""
    data = folder / "questions.jsonl"
    data.write_text("\n".join(map(json.dumps, QUESTIONS)), encoding="utf-8")
    q = "{{q}}"
    for name, kind, target, more in (
        ("choose", "multiple_choice", "0", CHOICES),
        ("continue", "generate_until", "q", GENERATE),
    ):
        (folder / f"{name}.yaml").write_text(
            TASK.format(name=name, data=data, kind=kind, text=q, target=target, more=more),
            encoding="utf-8",
        )


def reference(prompt: str, more: str) -> float:
    """The log-probability of `more` after `prompt`, by Transformers."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    whole, start = tokenizer(prompt + more).input_ids, len(tokenizer(prompt).input_ids)
    with torch.no_grad():
        scores = model(torch.tensor([whole])).logits[0].log_softmax(-1)
    return sum(float(scores[at - 1, whole[at]]) for at in range(start, len(whole)))


def test_the_evaluation_harness(tmp_path: Path):
    need("lm_eval")
    tasks(tmp_path)
    arguments = f"pretrained={MODEL},dtype=float32,max_model_len=256,max_num_seqs=4"
    command(
        "quire.compat", "-m", "lm_eval", "run", "--model", "vllm", "--model_args", arguments, "--log_samples",
        "--tasks", "choose,continue", "--include_path", str(tmp_path), "--output_path", str(tmp_path / "out"),
        HF_DATASETS_CACHE=str(tmp_path / "cache"),
    )  # fmt: skip
    (chosen,) = (tmp_path / "out").rglob("samples_choose_*.jsonl")
    for line in map(json.loads, chosen.read_text().splitlines()):
        found = [float(response[0][0]) for response in line["resps"]]
        expected = [reference(line["doc"]["q"], more) for more in line["doc"]["choices"]]
        assert all(map(lambda a, b: math.isclose(a, b, abs_tol=2e-4), found, expected)), (
            found,
            expected,
        )
    (made,) = (tmp_path / "out").rglob("samples_continue_*.jsonl")
    for line in map(json.loads, made.read_text().splitlines()):
        assert len(line["resps"][0][0]) > 5


PROGRAMS: dict[str, tuple[str, str]] = {
    "langchain": ("langchain_community.llms", """
from langchain_community.llms import VLLM
model = VLLM(model=MODEL, max_new_tokens=8, temperature=0, vllm_kwargs={"max_model_len": 128, "max_num_seqs": 2})
assert len(model.invoke("Once upon a time")) > 5
"""),
    "outlines": ("outlines", """
import outlines, vllm
model = outlines.from_vllm_offline(vllm.LLM(MODEL, max_model_len=128, max_num_seqs=2))
assert model("A dog:", outlines.types.Regex("[ab]{3}")).strip("ab") == ""
"""),
    "metrics": ("prometheus_client", """
from vllm import LLM, SamplingParams
from vllm.v1.metrics.reader import Counter, Gauge, Histogram, Vector
llm = LLM(MODEL, max_model_len=128, max_num_seqs=2, disable_log_stats=False)
llm.generate(["a", "b"], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
found = {metric.name: metric for metric in llm.get_metrics()}
assert isinstance(found["vllm:generation_tokens"], Counter) and found["vllm:generation_tokens"].value == 8
assert isinstance(found["vllm:num_requests_running"], Gauge)
latency = found["vllm:e2e_request_latency_seconds"]
assert isinstance(latency, Histogram) and latency.count == latency.buckets["+Inf"] == 2
"""),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program(name: str, tmp_path: Path):
    needs, text = PROGRAMS[name]
    need(needs.partition(".")[0])
    program: Any = tmp_path / "program.py"
    program.write_text(f"MODEL = {str(MODEL)!r}\n{text}\nprint('well')\n", encoding="utf-8")
    assert command("quire.compat", str(program)).strip().endswith("well")
