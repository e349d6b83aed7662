"""Decode steps of vLLM on a CPU with its LoRA adapters: the measurement of `python -m benchmarks lora`.

The Python of vLLM's environment runs it:

    python lora_vllm.py '{"model": ..., "adapters": [directory, ...], "distinct": [0, 1, 8], "rows": 32, ...}'

Its last line is JSON: {"seconds": {"0": [seconds per step, ...], "1": ...}, "version": ...}.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import lines


def main() -> None:
    asked = json.loads(sys.argv[1])
    answers = lines.own_output()
    lines.settle_vllm(asked)
    import vllm
    from vllm.lora.request import LoRARequest

    paths = asked["adapters"]
    llm = vllm.LLM(
        model=asked["model"], dtype=asked["dtype"], skip_tokenizer_init=True, max_model_len=1024,
        max_num_seqs=asked["rows"], enable_prefix_caching=False, disable_log_stats=True,
        enable_lora=True, max_loras=len(paths), max_lora_rank=asked["rank"],
    )  # fmt: skip
    requests = [LoRARequest(f"a{n}", n + 1, path) for n, path in enumerate(paths)]

    def seconds(output: int, distinct: int) -> float:
        params = vllm.SamplingParams(
            temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False
        )
        inputs: Any = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
        adapters = [requests[n % distinct] if distinct else None for n in range(len(inputs))]
        start = time.perf_counter()
        llm.generate(inputs, params, use_tqdm=False, lora_request=adapters if distinct else None)
        return time.perf_counter() - start

    found: dict[str, list[float]] = {str(distinct): [] for distinct in asked["distinct"]}
    for number in range(asked["rounds"] + 1):
        for distinct in asked["distinct"]:
            short = seconds(1, distinct)
            step = (seconds(1 + asked["output"], distinct) - short) / asked["output"]
            if number:  # the first round warms up
                found[str(distinct)].append(step)
    print(json.dumps({"seconds": found, "version": vllm.__version__}), file=answers, flush=True)


if __name__ == "__main__":  # vLLM's engine process imports this file again
    main()
