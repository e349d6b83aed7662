"""llama.cpp by its batch API, token ids in and out: see lines.py. Its environment's Python runs it."""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

import lines
import llama_cpp
import numpy as np


class Engine:
    """One context with a sequence for each request. All sequences decode in one batch a step."""

    def __init__(self, asked: dict[str, Any]):
        llama_cpp.llama_backend_init()
        options = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(asked["model"].encode(), options)
        params = llama_cpp.llama_context_default_params()
        self.batch_size = asked["batched_tokens"]
        params.n_seq_max = asked["rows"]
        params.n_ctx = asked["rows"] * (asked["length"] + 32)
        params.n_batch, params.n_ubatch = self.batch_size, 512
        params.n_threads = params.n_threads_batch = asked["threads"]
        params.kv_unified = False
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError("llama.cpp made no context")
        vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        self.vocab = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self.batch = llama_cpp.llama_batch_init(self.batch_size, 0, 1)

    def generate(self, prompts: list[list[int]], output: int) -> list[list[int]]:
        memory = llama_cpp.llama_get_memory(self.context)
        llama_cpp.llama_memory_clear(memory, True)
        answers: list[list[int]] = [[] for _ in prompts]
        waiting = [
            (row, place, token, place == len(prompt) - 1)
            for row, prompt in enumerate(prompts)
            for place, token in enumerate(prompt)
        ]
        while waiting:
            some, waiting = waiting[: self.batch_size], waiting[self.batch_size :]
            self.decode(some, answers)
        for step in range(1, output):
            self.decode(
                [
                    (row, len(prompts[row]) + step - 1, answer[-1], True)
                    for row, answer in enumerate(answers)
                ],
                answers,
            )
        return answers

    def decode(self, places: list[tuple[int, int, int, bool]], answers: list[list[int]]) -> None:
        """Run (sequence, position, token, whether its logits are wanted) and append the best tokens."""
        batch = self.batch
        batch.n_tokens = len(places)
        for i, (row, position, token, wanted) in enumerate(places):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = row, wanted
        if status := llama_cpp.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode: status {status}")
        for i, (row, _, _, wanted) in enumerate(places):
            if wanted:
                logits = llama_cpp.llama_get_logits_ith(self.context, i)
                found = np.ctypeslib.as_array(
                    ctypes.cast(logits, ctypes.POINTER(ctypes.c_float)), (self.vocab,)
                )
                answers[row].append(int(found.argmax()))


def main() -> None:
    asked = json.loads(sys.argv[1])
    answers = lines.own_output()
    engine = Engine(asked)
    system = llama_cpp.llama_print_system_info().decode().split("|")
    on = [part.strip() for part in system if part.strip().endswith("= 1")]
    about = {
        "version": llama_cpp.__version__,
        "threads": asked["threads"],
        "keys and values": "float16",
        "built with": " ".join(part.split()[-3] for part in on),
    }
    lines.serve(answers, about, engine.generate)


if __name__ == "__main__":
    main()
