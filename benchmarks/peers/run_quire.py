"""Quire, token ids in and out: see lines.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import lines

sys.path.insert(0, str(Path(__file__).parents[2]))  # the script's own folder is first on the path


def main() -> None:
    asked = json.loads(sys.argv[1])
    answers = lines.own_output()
    import torch

    import quire
    from benchmarks.offline.runners import Quire
    from benchmarks.shapes import Workload

    options = {"kv_cache_memory_bytes": int(asked["kv_gib"] * 2**30), **asked["options"]}
    engine = Quire(asked["model"], asked["dtype"], asked["rows"], asked["length"], options)

    def generate(prompts: list[list[int]], output: int) -> list[list[int]]:
        return engine.run(Workload(len(prompts), len(prompts[0]), output), prompts).tokens

    about = {
        "version": quire.__version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "keys and values": asked["options"].get("kv_cache_dtype", asked["dtype"]),
    }
    lines.serve(answers, about, generate)
    engine.close()


if __name__ == "__main__":
    main()
