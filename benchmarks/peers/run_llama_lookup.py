"""llama.cpp by llama-cpp-python, greedy, one request at a time, with or without its look-up of the prompt: see lines.py.

Its environment's Python runs it. Options: the arguments of `LlamaPromptLookupDecoding`; none: no look-up.
"""

from __future__ import annotations

import itertools
import json
import sys

import lines
import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding


def main() -> None:
    asked = json.loads(sys.argv[1])
    answers = lines.own_output()
    options = asked["options"]
    engine = llama_cpp.Llama(
        asked["model"], n_ctx=asked["length"], n_batch=asked["length"], n_threads=asked["threads"],
        n_threads_batch=asked["threads"], logits_all=bool(options), verbose=False,
        draft_model=LlamaPromptLookupDecoding(**options) if options else None,
    )  # fmt: skip

    def generate(prompts: list[list[int]], output: int) -> list[list[int]]:
        found = []
        for prompt in prompts:
            engine.reset()
            engine.n_tokens = 0  # nothing of the last request is used again
            found.append(list(itertools.islice(engine.generate(prompt, temp=0.0), output)))
        return found

    about = {
        "version": llama_cpp.__version__,
        "threads": asked["threads"],
        "keys and values": "float16",
    }
    lines.serve(answers, about, generate)


if __name__ == "__main__":
    main()
