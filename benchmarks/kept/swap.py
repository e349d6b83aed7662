"""Many long requests in a third of the memory that they need: swap space beside computing again."""

from __future__ import annotations

from typing import Any

from benchmarks.kept.engines import KeptEngine, Model

BLOCK = 16


def measure(
    model: Model, rows: int, prompt: int, output: int, rounds: int, more: dict[str, Any]
) -> dict[str, Any]:
    """Both engines answer the same prompts, in turns; each round has new ones."""
    blocks = rows * -(-(prompt + output) // BLOCK)
    common = {
        "max_model_len": prompt + output, "max_num_seqs": rows, "block_size": BLOCK,
        "num_gpu_blocks_override": blocks // 3 + 1, **model.shorter, **more,
    }  # fmt: skip
    engines = {
        "swap": KeptEngine(model, {**common, "swap_space": 4}),
        "computed again": KeptEngine(model, common),
    }
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    equal, preemptions = True, dict.fromkeys(engines, 0)
    try:
        for number in range(rounds + 1):
            prompts, answers = model.prompts(f"swap {number}", rows, prompt), []
            names = list(engines) if number % 2 else list(engines)[::-1]
            for name in names:
                tokens, _, took = engines[name].run(prompts, output)
                answers.append(tokens)
                if number:  # the first one starts threads and measures rates
                    seconds[name].append(took)
            equal &= answers[0] == answers[1]
        for name, one in engines.items():
            preemptions[name] = one.core.scheduler.count.preemptions
    finally:
        for one in engines.values():
            one.client.close()
    return {
        "requests": rows, "prompt_tokens": prompt, "output_tokens": output, "blocks": blocks // 3,
        "equal_tokens": equal, "preemptions": preemptions, "seconds": seconds,
    }  # fmt: skip
