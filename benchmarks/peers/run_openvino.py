"""OpenVINO GenAI with continuous batching, token ids in and out: see lines.py. Its environment's Python runs it."""

from __future__ import annotations

import json
import sys

import lines
import numpy as np
import openvino
import openvino_genai as genai


def main() -> None:
    asked = json.loads(sys.argv[1])
    answers = lines.own_output()
    schedule = genai.SchedulerConfig()
    schedule.cache_size = asked["kv_gib"]
    schedule.max_num_seqs = asked["rows"]
    schedule.max_num_batched_tokens = asked["batched_tokens"]
    schedule.enable_prefix_caching = False
    properties = {"INFERENCE_PRECISION_HINT": "bf16", **asked["options"]}
    pipe = genai.ContinuousBatchingPipeline(asked["model"], schedule, "CPU", properties)

    def generate(prompts: list[list[int]], output: int) -> list[list[int]]:
        wanted = genai.GenerationConfig()
        wanted.max_new_tokens = output
        wanted.do_sample = False
        wanted.ignore_eos = True
        wanted.set_eos_token_id(0)  # the checkpoint has none, but GenAI requires one
        tensors = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        done = pipe.generate(tensors, [wanted] * len(tensors))
        return [list(one.m_generation_ids[0]) for one in done]

    compiled = openvino.Core().get_property("CPU", "KV_CACHE_PRECISION")
    about = {
        "version": genai.__version__,
        "keys and values": str(properties.get("KV_CACHE_PRECISION", compiled.to_string())),
        "batched tokens": asked["batched_tokens"],
    }
    lines.serve(answers, about, generate)


if __name__ == "__main__":
    main()
