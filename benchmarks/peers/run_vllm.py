"""vLLM on a CPU, token ids in and out: see lines.py. The Python of vLLM's environment runs it."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import lines


def main() -> None:
    asked = json.loads(sys.argv[1])
    answers = lines.own_output()
    lines.settle_vllm(asked)
    import torch
    import vllm

    llm = vllm.LLM(
        model=asked["model"], dtype=asked["dtype"], skip_tokenizer_init=True, max_model_len=asked["length"],
        max_num_seqs=asked["rows"], enable_prefix_caching=False, disable_log_stats=True, **asked["options"],
    )  # fmt: skip

    def generate(prompts: list[list[int]], output: int) -> list[list[int]]:
        params = vllm.SamplingParams(
            temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False
        )
        inputs: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        done = llm.generate(inputs, params, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in done]

    about = {
        "version": vllm.__version__,
        "torch": torch.__version__,
        "threads": os.environ["VLLM_CPU_OMP_THREADS_BIND"],
        "preloaded": os.environ.get("LD_PRELOAD", ""),
        "keys and values": asked["dtype"],
    }
    lines.serve(answers, about, generate)


if __name__ == "__main__":  # vLLM's engine process imports this file again
    main()
