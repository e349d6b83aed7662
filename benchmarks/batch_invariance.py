"""`python -m benchmarks divergence`: how often a bf16 answer depends on the other requests of its steps, and where.

The embedded model answers the same prompts alone and then in other batches. The benchmark counts answers with different
tokens, and reports the first different token and the gap between the two best logprobs there. Each kind of kernels runs
in its own process, because a process chooses kernels once. It times nothing, so other load does no harm.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import roofline
from benchmarks.result_files import free_name
from quire import env
from quire.protocol.sampling_params import SamplingParams

TOKENS = 128
BEGINNINGS = ("Once upon a time, there was a {}", "The {} said that", "One day a {} and a dog")
ANIMALS = [
    "fox",
    "bear",
    "owl",
    "cat",
    "frog",
    "goat",
    "hen",
    "duck",
    "lion",
    "mouse",
    "crow",
    "seal",
    "wolf",
    "bee",
    "deer",
]
PROMPTS = [text.format(animal) for animal in ANIMALS for text in BEGINNINGS]
SETTINGS: dict[str, dict[str, Any]] = {
    "in one batch": {},
    "four at a time": {"max_num_seqs": 4},
    "prompts in chunks of 5": {"max_num_batched_tokens": 5, "max_num_seqs": 4},
    "host a step ahead": {"async_scheduling": True},
    "blocks of 16": {"block_size": 16},
}
KERNELS = {"native": "auto", "plain torch": "none"}


def answers(llm: Any, prompts: list[str], logprobs: int | None = None) -> list[Any]:
    params = SamplingParams(
        temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=logprobs, seed=0
    )
    return [out.outputs[0] for out in llm.generate(prompts, params, use_tqdm=False)]


def gap(completion: Any, at: int) -> float:
    """Difference of the logprobs of the two best tokens, in nats."""
    best, second = sorted((lp.logprob for lp in completion.logprobs[at].values()), reverse=True)[:2]
    return float(best - second)


def compare(alone: list[Any], others: list[Any]) -> dict[str, Any]:
    """How many of `others` equal the answers alone; for the rest, the token where they diverge and the gap there."""
    parts = []
    for one, other in zip(alone, others, strict=True):
        pairs = enumerate(zip(one.token_ids, other.token_ids, strict=True))
        at = next((i for i, (a, b) in pairs if a != b), None)
        if at is not None:
            parts.append((at, gap(one, at)))
    return {
        "answers": len(alone),
        "the_same": len(alone) - len(parts),
        "median_token_of_parting": median(at for at, _ in parts) if parts else None,
        "widest_gap_at_parting": round(max(gap for _, gap in parts), 4) if parts else None,
    }


def here(dtype: str) -> dict[str, Any]:
    """Run all settings in this process."""
    from quire.api.llm import LLM

    common: dict[str, Any] = {"dtype": dtype, "max_model_len": 512, "disable_log_stats": True}
    llm = LLM(**common)
    alone = [answers(llm, [prompt], logprobs=2)[0] for prompt in PROMPTS]
    rows = {"again, from the prefix cache": compare(alone, answers(llm, PROMPTS))}
    for name, setting in SETTINGS.items():
        rows[name] = compare(alone, answers(LLM(**common, **setting), PROMPTS))
    return rows


def in_a_child(dtype: str, isa: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks", "divergence", "--here", "--dtype", dtype]
    environment = env.for_a_child(QUIRE_CPU_ISA=isa, QUIRE_LOGGING_LEVEL="ERROR")
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(run.stderr[-2000:])
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


def table(result: dict[str, Any]) -> str:
    lines = [
        "| format | kernels | setting | the same | parts at token (median) | widest gap there, nats |",
        "|---|---|---|---|---|---|",
    ]
    for key, rows in result["runs"].items():
        for setting, row in rows.items():
            at, wide = row["median_token_of_parting"], row["widest_gap_at_parting"]
            lines.append(
                f"| {key.replace('/', ' | ')} | {setting} | {row['the_same']} of {row['answers']} |"
                f" {'' if at is None else at} | {'' if wide is None else wide} |"
            )
    return "\n".join(lines)


def page(result: dict[str, Any]) -> str:
    about = result["machine"]
    return (
        f"# Divergence on quire-tiny, {result['date']}\n\n"
        f"Machine: {about['cpu']}, torch {about['torch']}. {len(PROMPTS)} prompts, greedy, {result['tokens']}"
        " tokens each; compared with the same prompt alone.\n\n"
        f"{table(result)}\n"
    )


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks divergence", description=__doc__)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--here", action="store_true", help="this process only; prints JSON")
    parser.add_argument("--out", type=Path, help="folder for the result; unset: print only")
    asked = parser.parse_args(argv)
    if asked.here:
        print(json.dumps(here(asked.dtype)))
        return 0
    runs = {
        f"{dtype}/{kernels}": in_a_child(dtype, isa)
        for dtype in dict.fromkeys((asked.dtype, "float32"))
        for kernels, isa in KERNELS.items()
        if not (dtype == "float32" and kernels == "native")  # the native kernels are bf16
    }
    about, today = roofline.describe(), datetime.date.today().isoformat()
    result = {"date": today, "machine": about, "tokens": TOKENS, "runs": runs}
    print(table(result))
    if asked.out is not None:
        asked.out.mkdir(parents=True, exist_ok=True)
        path = free_name(asked.out, f"{today}-divergence-{roofline.slug(about)}")
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        path.with_suffix(".md").write_text(page(result), encoding="utf-8")
        print(f"\nwritten to {path}")
    return 0
