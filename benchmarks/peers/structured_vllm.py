"""The cost of structured outputs in vLLM on a CPU: the measurement of `python -m benchmarks structured`.

The Python of vLLM's environment runs it:

    python structured_vllm.py '{"model": ..., "tokenizer": ..., "rows": 32, "output": 24, "rounds": 3, ...}'

Its last line is JSON: {"free": [seconds per step, ...], "held": [...], "first_free": [seconds, ...],
"first_held": [...], "version": ...}.
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
    from vllm.sampling_params import StructuredOutputsParams

    llm = vllm.LLM(
        model=asked["model"], tokenizer=asked["tokenizer"], dtype=asked["dtype"], max_model_len=1024,
        max_num_seqs=asked["rows"], enable_prefix_caching=False, disable_log_stats=True,
    )  # fmt: skip

    def seconds(prompts: list[list[int]], output: int, schema: Any) -> float:
        held = None if schema is None else StructuredOutputsParams(json=schema)
        params = vllm.SamplingParams(
            temperature=0.0, max_tokens=output, ignore_eos=True, structured_outputs=held
        )
        inputs: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        start = time.perf_counter()
        done = llm.generate(inputs, params, use_tqdm=False)
        spent = time.perf_counter() - start
        if any(len(one.outputs[0].token_ids) != output for one in done):
            raise SystemExit("a request ended early")
        return spent

    def step(schema: Any) -> float:
        """Seconds per step of all rows, from the time of `output` more tokens."""
        short = seconds(asked["prompts"], 1, schema)
        return (seconds(asked["prompts"], 1 + asked["output"], schema) - short) / asked["output"]

    one = asked["prompts"][:1]
    found: dict[str, Any] = {"free": [], "held": [], "first_free": [], "first_held": []}
    for schema in (None, asked["endless"]):  # warm up both
        step(schema)
    seconds(one, 1, asked["fresh"][-1])
    for number in range(asked["rounds"]):
        found["free"].append(step(None))
        found["held"].append(step(asked["endless"]))
        found["first_free"].append(seconds(one, 1, None))
        found["first_held"].append(seconds(one, 1, asked["fresh"][number]))
    print(json.dumps({**found, "version": vllm.__version__}), file=answers, flush=True)


if __name__ == "__main__":  # vLLM's engine process imports this file again
    main()
