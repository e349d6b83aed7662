"""`python -m benchmarks WHAT`: the first word names the benchmark.

It imports only the module of that benchmark, because the load generator must run without torch.
"""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Sequence

KINDS = {
    "offline": ("offline.run", "throughput beside Transformers; the default"),
    "peers": ("peers.run", "throughput beside vLLM and OpenVINO, each in its own environment"),
    "serving": ("serving_cost", "the HTTP process's CPU, and tokens/s at 1, 16 and 64 clients"),
    "streaming": ("streaming_cost", "streaming to clients, beside the same requests offline"),
    "steps": ("scheduler_step", "the scheduler's cost of one step"),
    "host": ("host_overhead", "the host's cost of one step of the whole engine, by part"),
    "paths": ("step_paths", "a step's CPU time by each of its implementations, in turns"),
    "loading": ("model_load", "memory while a model loads, and seconds to its first token"),
    "quality": ("quality", "the error of quantized weights and of a quantized KV cache"),
    "divergence": ("batch_invariance", "how often other requests change a bf16 answer"),
    "structured": ("structured_outputs", "the cost of structured outputs"),
    "embed": ("embed", "embedding and reranking beside sentence-transformers, ONNX and OpenVINO"),
    "speech": ("speech", "Whisper beside Transformers, faster-whisper and whisper.cpp"),
    "speculation": (
        "speculation",
        "the speed of speculative decoding, beside the same engine without",
    ),
    "lora": ("lora", "the speed of LoRA adapters, beside the same engine without"),
    "picture-clients": (
        "picture_clients",
        "requests/s of 16 clients that send pictures, beside other servers",
    ),
    "pictures": ("pictures", "TTFT of text requests beside 64 requests with pictures"),
    "towers": ("vision_towers", "vision towers beside Transformers'"),
    "ranks": ("ranks", "the exchange of ranks beside gloo, and the host's part of their step"),
    "layouts": ("layouts.run", "which layout of several devices would be fastest, on paper"),
    "neighbour": ("neighbour", "decoding beside a busy process, with the peers"),
    "kept": ("kept.run", "kept KV blocks, swap space and resume, beside computing again"),
    "gpu": ("gpu.run", "a GPU's kernels, steps and serving: checked, then timed"),
}
"""Word -> (module with `main(argv) -> int`, what it measures)."""


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] in (["-h"], ["--help"]):
        print(usage(), end="")
        return 0
    kind = words.pop(0) if words and words[0] in KINDS else "offline"
    if kind == "offline" and words and not words[0].startswith("-"):
        known = ", ".join(KINDS)
        print(f"python -m benchmarks: error: {words[0]!r}: not one of {known}", file=sys.stderr)
        return 2
    # On SIGTERM, exit by an exception, so that started servers and stopped engines are ended.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    return int(importlib.import_module(f"benchmarks.{KINDS[kind][0]}").main(words))


def usage() -> str:
    lines = ["usage: python -m benchmarks [WHAT] ...", ""]
    lines += [f"  {name:<11} {about}" for name, (_, about) in KINDS.items()]
    return "\n".join([*lines, "", "`python -m benchmarks WHAT --help` lists its options.", ""])


if __name__ == "__main__":
    raise SystemExit(main())
