"""`python -m benchmarks kept`: what kept KV blocks, swap space and resume cost and save.

    restart   first token of a long prompt: from the disk after a restart, beside computing; the disk's rate beside O_DIRECT
    swap      requests in a third of the memory that they need: swap space, beside computing again
    unused    a decode step with a folder that has nothing for it, beside none
    crash     SIGKILL of the engine under many streams: seconds to the next token, beside the engine's start

Contenders take turns; the table has medians. The weights are random. The folder needs room for the prompt (112 KiB a token), on the disk to measure.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import result_files, shapes

SECTIONS = ("restart", "swap", "unused", "crash")
LAYERS = 10
"""Of the model where a step is measured beside another: the copies and the arithmetic of a layer are the same in all."""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks kept", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    shapes.add_options(parser)
    add = parser.add_argument
    add("--model", help="a model instead of a random one of --shape, such as quire-tiny")
    add("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="SECTION")
    add(
        "--folder",
        type=Path,
        help="where kept blocks are; unset: a temporary folder, removed afterwards",
    )
    add("--prompt", type=int, default=8192, metavar="TOKENS", help="of restart")
    add(
        "--rows",
        type=int,
        default=32,
        metavar="N",
        help="requests of swap, streams of crash; unused has half",
    )
    add("--swap-lengths", nargs=2, type=int, default=[320, 160], metavar=("PROMPT", "OUTPUT"))
    add("--steps", type=int, default=240, metavar="N", help="of unused")
    add("--rounds", type=int, default=3, metavar="N")
    add(
        "--slots", action="store_true", help="restart: also llama.cpp, which restores a slot's file"
    )
    add("--peers", type=Path, default=Path(".cache/peers"), help="folder of the peers' environments")  # fmt: skip
    given = parser.parse_args(argv)
    folder = given.folder or Path(tempfile.mkdtemp(prefix="quire-kept-"))
    try:
        found = {name: measure(name, given, folder) for name in SECTIONS if name in given.only}
    finally:
        if given.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    result = {"command": " ".join(["python -m benchmarks kept", *argv]), "model": given.model or given.shape, "sections": found}  # fmt: skip
    title = f"Kept KV blocks, swap and resume of {result['model']}"
    result_files.report(given.out, "kept", title, result, table(found))
    return 0


def measure(name: str, given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from benchmarks.kept import crash, restart, swap
    from benchmarks.kept.llama_slots import LlamaSlots

    model, (length, output) = _model(given), given.swap_lengths
    cache = {"kv_cache_memory_bytes": 4 << 30} if given.model is None else {"kv_cache_memory_bytes": 64 << 20}  # fmt: skip
    sections: dict[str, Callable[[], dict[str, Any]]] = {
        "restart": lambda: restart.measure(model, folder / "restart", given.prompt, given.rounds, cache | _longer(model, given.prompt),
                                           LlamaSlots(given, folder / "slots", given.prompt) if given.slots else None),
        "swap": lambda: swap.measure(model, given.rows, length, output, given.rounds, {}),
        "unused": lambda: restart.unused(model, folder, max(given.rows // 2, 1), given.steps, {"kv_cache_memory_bytes": 512 << 20} if given.model is None else cache),
        "crash": lambda: crash.measure(model, given.rows, given.rounds, ["--kv-cache-memory-bytes", str(cache["kv_cache_memory_bytes"])]),
    }  # fmt: skip
    print(f"{name} ...", flush=True)
    return sections[name]()


def _model(given: argparse.Namespace) -> Any:
    from benchmarks.kept.engines import Model

    if given.model is not None:
        return Model(given.model, 200, {})
    shape = shapes.SHAPES[given.shape]
    path = shapes.checkpoint(shape, "bfloat16", given.cache)
    return Model(str(path), shape.vocab, {"hf_overrides": {"num_hidden_layers": LAYERS}})


def _longer(model: Any, prompt: int) -> dict[str, Any]:
    """Settings that allow prompts beyond the shape's length."""
    config = Path(model.path) / "config.json"
    if not config.exists() or json.loads(config.read_text())["max_position_embeddings"] > prompt:
        return {}
    return {"hf_overrides": {"max_position_embeddings": 2 * prompt}}


def table(found: dict[str, Any]) -> str:
    """A Markdown table of medians, with the aims."""
    lines = ["| measured | | beside | | quotient | aim |", "|---|---|---|---|---|---|"]

    def row(what: str, one: str, other: str, quotient: str, aim: str, beside: str) -> None:
        lines.append(f"| {what} | {one} | {beside} | {other} | {quotient} | {aim} |")

    if part := found.get("restart"):
        disk, computed = (median(part["seconds"][name]) for name in ("from disk", "computed"))
        row(f"first token of {part['prompt_tokens']} tokens, from disk after a restart", f"{disk:.2f} s", f"{computed:.2f} s",
            f"{computed / disk:.1f}x sooner", "10x", "computed")  # fmt: skip
        if slot := part["seconds"].get("llama.cpp's slot"):
            row(
                "the same",
                f"{disk:.2f} s",
                f"{median(slot):.2f} s",
                f"{median(slot) / disk:.2f}x sooner",
                "> 1x",
                "llama.cpp's slot",
            )
        store, direct = (median(part["disk"][name]) / 1e9 for name in ("store", "O_DIRECT"))
        row("reads of the folder, with checks", f"{store:.2f} GB/s", f"{direct:.2f} GB/s", f"{store / direct:.0%}", "80 %", "O_DIRECT")  # fmt: skip
    if part := found.get("swap"):
        swap, again = (median(part["seconds"][name]) for name in ("swap", "computed again"))
        row(f"{part['requests']} requests in a third of the memory, swap ({part['preemptions']['swap']} preemptions)",
            f"{swap:.2f} s", f"{again:.2f} s", f"{again / swap:.2f}x", "1.2x, never < 0.97x", "computed again")  # fmt: skip
    if part := found.get("unused"):
        off = median(part["ms"]["off"])
        for name in part["ms"]:
            if name != "off":
                ms = median(part["ms"][name])
                row(f"a step of {part['rows']} rows, unused folder, --kv-disk-write {name}", f"{ms:.2f} ms", f"{off:.2f} ms",
                    f"{ms / off - 1:+.1%}", "<= 1 %", "no folder")  # fmt: skip
    if part := found.get("crash"):
        first, last, ready = (
            median(part["seconds"][name]) for name in ("first token", "last stream", "ready")
        )
        for what, seconds in (("first", first), ("last", last)):
            row(f"SIGKILL under {part['streams']} streams: {what} stream goes on", f"{seconds:.2f} s", f"{ready:.2f} s",
                f"{seconds - ready:+.2f} s", "<= 2 s" if what == "first" else "", "engine ready")  # fmt: skip
    equal = [part["equal_tokens"] for part in found.values() if "equal_tokens" in part]
    return "\n".join([*lines, "", f"Tokens are equal: {all(equal)}." if equal else ""])
