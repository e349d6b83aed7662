"""llama.cpp that keeps the keys and values of a prompt in a file, as its server's slots do: see lines.py.

A prompt that no file is kept for is computed, and saved after its last token; one with a file is restored from it, and only its last token
is computed, as the server does. `options["folder"]`: where the files are.
"""

from __future__ import annotations

import ctypes
import json
import sys
import zlib
from pathlib import Path

import lines
import llama_cpp
import run_llama_cpp


def main() -> None:
    asked = json.loads(sys.argv[1])
    answers = lines.own_output()
    engine = run_llama_cpp.Engine(asked)
    folder = Path(asked["options"]["folder"])

    def generate(prompts: list[list[int]], output: int) -> list[list[int]]:
        ((prompt,), file) = prompts, folder / f"slot-{zlib.crc32(json.dumps(prompts).encode())}"
        known = (llama_cpp.llama_token * len(prompt))(*prompt)
        if not file.exists():
            answer = engine.generate(prompts, output)
            if not llama_cpp.llama_state_seq_save_file(engine.context, str(file).encode(), 0, known, len(prompt)):  # fmt: skip
                raise RuntimeError(f"llama.cpp could not save {file}")
            return answer
        memory = llama_cpp.llama_get_memory(engine.context)
        llama_cpp.llama_memory_clear(memory, True)
        count = ctypes.c_size_t()
        if not llama_cpp.llama_state_seq_load_file(engine.context, str(file).encode(), 0, known, len(prompt), ctypes.byref(count)):  # fmt: skip
            raise RuntimeError(f"llama.cpp could not restore {file}")
        last = len(prompt) - 1
        llama_cpp.llama_memory_seq_rm(memory, 0, last, -1)
        found: list[list[int]] = [[]]
        for place in range(last, last + output):
            engine.decode([(0, place, [*prompt, *found[0]][place], True)], found)
        return found

    about = {
        "version": llama_cpp.__version__,
        "threads": asked["threads"],
        "keys and values": "float16",
    }
    lines.serve(answers, about, generate)


if __name__ == "__main__":
    main()
