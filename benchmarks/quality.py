"""`python -m benchmarks quality`: the quality loss of quantization, on the embedded model.

It compares with bfloat16: every online method of `--quantization`, every 8-bit `--kv-cache-dtype`, and checkpoints in
the formats of other tools (`rtn_checkpoints.py` writes them). `fp8` on a CPU is `int8`, and not measured twice.

Two measures. The tasks that the model was trained for (`tools/tiny_model`, so only in the repository), greedy, by exact
match. And the distribution of the next token: the model reads the same texts in short chunks, so that later chunks
attend to the quantized cache of earlier ones, and the benchmark computes KL(bfloat16 || scheme) over the vocabulary at
each token. It times nothing, so other load does no harm.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import result_files, rtn_checkpoints
from quire.config.cache import KV_DTYPES
from quire.config.quantization import online_schemes
from quire.errors import ConfigError, QuireError
from quire.kvcache.specs import ELEMENTS
from quire.protocol.sampling_params import SamplingParams

BASE = "bfloat16"
ANSWER = 260  # limit on the tokens of an answer: see tools/tiny_model/evaluate.py
STORED = "stored"  # among keywords: the format of a checkpoint to write first
PIECE = 16  # tokens of a text that one step reads
LONGEST = 1024  # limit on the tokens of a text


def schemes() -> dict[str, dict[str, Any]]:
    """Name -> keywords of the engine, or the format of its checkpoint; the first is the baseline."""
    weights: dict[str, dict[str, Any]] = {
        f"{name} weights": {"quantization": name} for name in online_schemes()
    }
    short = [name for name in dict.fromkeys(KV_DTYPES.values()) if ELEMENTS[name].itemsize == 1]
    cache: dict[str, dict[str, Any]] = {f"{name} KV": {"kv_cache_dtype": name} for name in short}
    both = {
        f"{one} weights, int8 KV": {"quantization": one, "kv_cache_dtype": "int8"}
        for one in ("int8", "int4")
    }
    stored = {f"{form} checkpoint": {STORED: form} for form in rtn_checkpoints.FORMS}
    return {BASE: {}, **weights, **cache, **both, **stored}


@dataclass(slots=True)
class Found:
    """The results of one scheme."""

    right: dict[str, int]  # by task
    answers: list[str]
    logits: Any  # [tokens, vocabulary], float32


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks quality", description=__doc__)
    add = parser.add_argument
    add("--model", default="quire-tiny", help="an embedded model, or a folder with its tokenizer")
    add("--schemes", nargs="+", choices=schemes(), metavar="NAME", help=f"of {', '.join(schemes())}; unset: all")  # fmt: skip
    add("--each", type=int, default=100, help="prompts of a task")
    add("--only", nargs="+", metavar="TASK", help="tasks; unset: all")
    add("--texts", type=int, default=64, help="texts whose distributions are compared")
    add("--out", type=Path, help="folder for the result; unset: print only")
    given = parser.parse_args(argv)
    try:
        result = measure(given)
    except QuireError as why:
        print(f"python -m benchmarks quality: error: {why}", file=sys.stderr)
        return 2 if isinstance(why, ConfigError) else 1
    kept = {"command": " ".join(["python -m benchmarks quality", *argv]), **result}
    title = f"What short numbers cost {given.model}"
    result_files.report(given.out, "quality", title, kept, page(result))
    return 0


def measure(given: argparse.Namespace) -> dict[str, Any]:
    exams = _exams(given.model, given.only, given.each)
    chosen: dict[str, dict[str, Any]] = {BASE: {}} | {k: v for k, v in schemes().items() if not given.schemes or k in given.schemes}  # fmt: skip
    base: Found | None = None
    texts: list[list[int]] = []
    rows: dict[str, dict[str, Any]] = {}
    for name, keywords in chosen.items():
        try:
            with _written(given.model, keywords) as asked:
                found, read = _run(asked, exams, texts, given.texts)
        except QuireError as why:
            if base is None:
                raise
            rows[name] = {"failed": str(why)}
            continue
        if base is None:
            base, texts = found, read
        rows[name] = {
            "right": found.right,
            "same_answers": sum(a == b for a, b in zip(found.answers, base.answers, strict=True)),
            **divergence(base.logits, found.logits),
        }
        print(f"{name}: {rows[name]}", flush=True)
    return {
        "model": given.model,
        "prompts": {name: len(samples) for name, samples in exams.items()},
        "texts": len(texts),
        "schemes": rows,
    }


@contextlib.contextmanager
def _written(model: str, keywords: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The engine's keywords; a checkpoint that they need exists within the context."""
    if STORED not in keywords:
        yield {"model": model, **keywords}
        return
    with tempfile.TemporaryDirectory() as folder:
        made = rtn_checkpoints.checkpoint(_folder(model), keywords[STORED], Path(folder))
        yield {"model": str(made)}


def _folder(model: str) -> Path:
    from quire.config.load import LoadConfig
    from quire.config.model import ModelConfig
    from quire.models.checkpoint_locator import locate

    return Path(locate(ModelConfig(model=model), LoadConfig()))


def _exams(model: str, only: Sequence[str] | None, each: int) -> dict[str, list[Any]]:
    """Task -> its prompts. Raises ConfigError: the task is unknown, or this is not the folder of the repository."""
    from transformers import PreTrainedTokenizerFast

    evaluate = _tasks("evaluate")
    if wrong := [name for name in only or () if name not in evaluate.EXAMS]:
        raise ConfigError(f"--only {', '.join(wrong)}: not one of {', '.join(evaluate.EXAMS)}")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(_folder(model))
    return {
        name: evaluate.prompts(evaluate.EXAMS[name], tokenizer, each)
        for name in only or evaluate.EXAMS
    }


def _tasks(module: str) -> Any:
    """A module of tools/tiny_model, which is not part of the package. Raises ConfigError."""
    try:
        return importlib.import_module(f"tools.tiny_model.{module}")
    except ImportError as why:
        raise ConfigError(
            f"the tasks are not there ({why}); run it in the folder of the repository"
        ) from why


def _run(
    keywords: dict[str, Any],
    exams: dict[str, list[Any]],
    texts: list[list[int]],
    many: int,
) -> tuple[Found, list[list[int]]]:
    """Run all tasks and texts with one scheme; without texts, make `many` from the first prompts and their answers."""
    from quire.api.llm import LLM

    prompt_of, answer = _tasks("chat").prompt_of, _tasks("evaluate").Answer
    common: dict[str, Any] = {"dtype": BASE, "disable_log_stats": True}
    params = SamplingParams(temperature=0, max_tokens=ANSWER)
    found = Found({}, [], None)
    spoken: list[list[int]] = []
    with LLM(**common, **keywords) as llm:
        for name, samples in exams.items():
            done = llm.generate([prompt_of(s) for s in samples], params, use_tqdm=False)
            said = [one.outputs[0] for one in done]
            found.right[name] = sum(
                answer(sample, one.text.split("</think>")[-1].strip(), one.finish_reason == "stop").right
                for sample, one in zip(samples, said, strict=True)
            )  # fmt: skip
            found.answers += [one.text for one in said]
            share = -(-many // len(exams))
            spoken += [[*d.prompt_token_ids, *d.outputs[0].token_ids][:LONGEST] for d in done[:share]]  # fmt: skip
    texts = texts or spoken[:many]
    narrow: dict[str, Any] = {
        "max_num_seqs": 1,
        "max_num_batched_tokens": PIECE,
        "enable_prefix_caching": False,
    }
    with LLM(**common, **narrow, **keywords) as llm:
        found.logits = _read(llm, texts)
    return found, texts


def _read(llm: Any, texts: list[list[int]]) -> Any:
    """The LM head's logits at every token of every text."""
    import torch

    seen: list[Any] = []
    model = llm.client.core.executor.worker.model
    logits = model.logits

    def noted(hidden: Any) -> Any:
        out = logits(hidden)
        seen.append(out.float().clone())
        return out

    model.logits = noted
    # With prompt logprobs, the head runs at each token of a prompt.
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    llm.generate([{"prompt_token_ids": text} for text in texts], params, use_tqdm=False)
    found = torch.cat(seen)
    if len(found) != sum(map(len, texts)):
        raise QuireError(f"{len(found)} logits of {sum(map(len, texts))} tokens")
    return found


def divergence(base_NV: Any, other_NV: Any) -> dict[str, float]:
    """KL(base || other) over tokens, in nats, and how often the best token is the same."""
    base, other = base_NV.log_softmax(-1), other_NV.log_softmax(-1)
    kl_N = (base.exp() * (base - other)).sum(-1)
    return {
        "kl_mean": float(kl_N.mean()),
        "kl_p99": float(kl_N.quantile(0.99)),
        "kl_worst": float(kl_N.max()),
        "same_best": float((base.argmax(-1) == other.argmax(-1)).float().mean()),
    }


def page(result: dict[str, Any]) -> str:
    prompts, rows = result["prompts"], result["schemes"]
    whole = sum(prompts.values())
    ran = {name: row for name, row in rows.items() if "failed" not in row}
    lines = [
        f"Exact match over {whole} prompts of {len(prompts)} tasks, greedy. KL(bfloat16 || scheme) of the next token, in nats, at each"
        f" place of {result['texts']} texts, read in pieces of {PIECE} tokens.",
        "",
        "| scheme | right | against bfloat16 | same answers | KL, mean | KL, p99 | KL, worst | same best token |",
        "|---|---|---|---|---|---|---|---|",
    ]
    base = sum(rows[BASE]["right"].values())
    for name, row in rows.items():
        if "failed" in row:
            lines.append(f"| {name} | could not run: {row['failed']} |{' - |' * 6}")
            continue
        right = sum(row["right"].values())
        lines.append(
            f"| {name} | {right / whole:.1%} | {(right - base) / whole:+.1%} | {row['same_answers'] / whole:.1%} |"
            f" {row['kl_mean']:.2g} | {row['kl_p99']:.2g} | {row['kl_worst']:.2g} | {row['same_best']:.2%} |"
        )
    lines += ["", "Right answers by task:", "", f"| task | prompts | {' | '.join(ran)} |", "|---" * (len(ran) + 2) + "|"]  # fmt: skip
    for task, many in prompts.items():
        cells = " | ".join(str(row["right"][task]) for row in ran.values())
        lines.append(f"| {task} | {many} | {cells} |")
    return "\n".join(lines)
