"""The drawings of README.md and docs/, each for a light and a dark page: the peers' benchmark, the blocks of an engine, ways to split a
model, the steps of speculative decoding, the way of a picture.

    python -m tools.readme_pictures            rewrite docs/pictures/*.svg
    python -m tools.readme_pictures --check    say whether they are current

Knows the result files of benchmarks/peers, and SVG.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs/pictures"
RESULT = ROOT / "benchmarks/results/2026-11-29-peers-qwen3-0.6b-intel-xeon-2c-3.json"
PALETTES = {
    "light": {"text": "#1c2230", "dim": "#565f70", "line": "#c9cfda", "card": "#f6f7f9", "quire": "#3f5de0", "vllm": "#e07b1a", "openvino": "#8a93a5", "on": "#ffffff"},
    "dark": {"text": "#e5e9f2", "dim": "#a0aabd", "line": "#3a4355", "card": "#191e28", "quire": "#7d95ff", "vllm": "#ffa24d", "openvino": "#8b95a8", "on": "#0d1016"},
}  # fmt: skip
WIDTH, FONT = 880, "system-ui, -apple-system, Segoe UI, Roboto, sans-serif"
WORKLOADS = {"1x32/64": "1 request, 64 tokens out", "8x128/64": "8 requests at once", "32x128/64": "32 requests at once", "1x1024/1": "prompt of 1,024 tokens"}  # fmt: skip
GROUPS = {
    "16 bits": "bfloat16 weights",
    "8 bits and fewer": "quantized weights (Quire: the faster of int8 and int4; vLLM: int8; OpenVINO: int4)",
}
PROMPT_ONLY = "1x1024/1"  # one token of output: its tokens a second are prompts a second
NAMES = {"quire": "Quire", "vllm": "vLLM 0.32", "openvino": "OpenVINO GenAI 2026.4"}


def text(x: float, y: float, words: str, colour: str, size: int = 14, more: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" fill="{colour}" font-size="{size}" {more}>{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, fill: str, more: str = "") -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}" {more}/>'


def drawing(height: float, title: str, parts: list[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" font-family="{FONT}" role="img">'
    return "\n".join([head, f"<title>{escape(title)}</title>", *parts, "</svg>\n"])


def speeds(result: dict[str, Any], group: str, workload: str) -> dict[str, float]:
    """Tokens per second of each peer's fastest kind of weights in a group: the median of the turns."""
    best: dict[str, float] = {}
    for engine, about in result["engines"].items():
        turns = [turn["tokens"] / turn["seconds"] for turn in result["turns"] if (turn["engine"], turn["workload"]) == (engine, workload)]  # fmt: skip
        if about["group"] == group and turns:
            peer = engine.partition("-")[0]
            best[peer] = max(best.get(peer, 0.0), median(turns))
    return best


def chart(colours: dict[str, str]) -> str:
    """Horizontal bars; within a workload, the length is the share of the fastest engine."""
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    parts, y, left, longest = [], 24.0, 210, WIDTH - 210 - 110
    for place, (peer, name) in enumerate(NAMES.items()):
        parts += [box(left + 190 * place, y - 11, 12, 12, colours[peer]), text(left + 190 * place + 18, y, name, colours["text"], 13)]  # fmt: skip
    for group, label in GROUPS.items():
        y += 34
        parts.append(text(0, y, label, colours["text"], 14, 'font-weight="600"'))
        for workload, words in WORKLOADS.items():
            y += 12
            here = speeds(result, group, workload)
            parts.append(text(0, y + 26, words, colours["dim"], 13))
            unit = "prompts/s" if workload == PROMPT_ONLY else "tokens/s"
            for peer in NAMES:
                wide = longest * here[peer] / max(here.values())
                parts += [box(left, y, wide, 14, colours[peer], 'rx="2"'), text(left + wide + 6, y + 12, f"{here[peer]:.3g} {unit}", colours["text"], 12)]  # fmt: skip
                y += 16
    y += 26
    machine = result["machine"]
    parts.append(text(0, y, f"Qwen3-0.6B shape, random weights, {machine['cores']} cores of an Intel Xeon with AMX, {result['date']}; medians of {result['rounds']} rounds in turns. Longer is better.", colours["dim"], 12))  # fmt: skip
    return drawing(y + 12, "Tokens per second of Quire, vLLM and OpenVINO on two CPU cores", parts)


ROWS = (
    ("HTTP server, LLM class, command line", "server/  api/  cli/", "OpenAI, Anthropic, Cohere and vLLM routes; a page with a live view"),
    ("Frontend", "frontend/", "chat templates, tokenizer, tool calls and reasoning"),
    ("Engine: one loop that plans, launches and commits", "engine/  scheduler/  kvcache/", "continuous batching, prefix cache, preemption, priorities"),
    ("Workers: one for each rank", "worker/  models/  layers/", "persistent batch, 68 architectures, sampling"),
    ("Kernels", "ops/  native/", "C++ for AMX, AVX-512, AVX2 and SSE2; Triton for CUDA (not run on a card yet)"),
)  # fmt: skip
ARROWS = ("text", "token ids", "StepPlan, StepResult", "tensors")


def diagram(colours: dict[str, str]) -> str:
    parts, y = [], 6.0
    for place, (title, folders, about) in enumerate(ROWS):
        parts.append(box(1, y, WIDTH - 2, 62, colours["card"], f'rx="10" stroke="{colours["line"]}"'))  # fmt: skip
        parts.append(box(1, y + 10, 5, 42, colours["quire" if place else "vllm"]))
        parts += [text(22, y + 26, title, colours["text"], 15, 'font-weight="600"'), text(22, y + 47, about, colours["dim"], 13)]  # fmt: skip
        parts.append(text(WIDTH - 18, y + 26, folders, colours["dim"], 13, 'text-anchor="end" font-family="ui-monospace, monospace"'))  # fmt: skip
        y += 62
        if place < len(ARROWS):
            parts.append(f'<path d="M60 {y + 3:.0f}v22m-5 -6l5 6l5 -6M80 {y + 25:.0f}v-22m-5 6l5 -6l5 6" stroke="{colours["dim"]}" fill="none" stroke-width="1.5"/>')  # fmt: skip
            parts.append(text(100, y + 19, ARROWS[place], colours["dim"], 12))
            y += 28
    return drawing(y + 8, "The parts of Quire, from the HTTP server down to the kernels", parts)


LAYERS, SPLIT_WIDTH = 6, 176
SPLITS = {
    "-tp 2": ("each layer in two", "one request is faster"),
    "-pp 2": ("half of the layers each", "larger models fit"),
    "-dp 2": ("the whole model, twice", "more requests at once"),
    "-pcp 2": ("half of a prompt each", "long prompts begin sooner"),
}


def splits(colours: dict[str, str]) -> str:
    """What each of two processes has of a model's layers."""
    first, second = colours["quire"], colours["vllm"]
    parts = [box(0, 4, 12, 12, first), text(18, 14, "process 0", colours["text"], 13), box(110, 4, 12, 12, second), text(128, 14, "process 1", colours["text"], 13)]  # fmt: skip
    gap = (WIDTH - len(SPLITS) * SPLIT_WIDTH) / (len(SPLITS) - 1)
    for place, (option, (what, why)) in enumerate(SPLITS.items()):
        x, half = place * (SPLIT_WIDTH + gap), SPLIT_WIDTH / 2
        for layer in range(LAYERS):
            y = 34 + 20 * layer
            if option == "-pp 2":
                parts.append(box(x, y, SPLIT_WIDTH, 15, first if layer < LAYERS / 2 else second, 'rx="2"'))  # fmt: skip
            else:
                space = {"-tp 2": 0, "-dp 2": 8, "-pcp 2": 8}[option]
                parts += [box(x + side * (half + space / 2), y, half - space / 2, 15, colour, 'rx="2"') for side, colour in ((0, first), (1, second))]  # fmt: skip
        if option == "-pcp 2":
            parts += [text(x + side * (half + 4) + half / 2, 166, words, colours["dim"], 11, 'text-anchor="middle"') for side, words in ((0, "tokens 1, 4"), (1, "tokens 2, 3"))]  # fmt: skip
        parts += [text(x, 188, option, colours["text"], 15, 'font-weight="600" font-family="ui-monospace, monospace"'), text(x, 207, what, colours["text"], 13), text(x, 225, why, colours["dim"], 13)]  # fmt: skip
    return drawing(236, "What two processes have of a model with six layers", parts)


LANES = (
    ("HTTP process", "finds and places pictures", ((0, "find the parts"), (1, "fetch all: one deadline"), (3, "write their tokens"))),
    ("media process", "may be killed at any time", ((1, "read the header"), (2, "decode"), (3, "resize, normalize"))),
    ("worker", "beside the language model", ((1, "vision tower, once"), (2, "rows in the cache"), (3, "embeddings"))),
)  # fmt: skip
"""The rows of the drawing, one for each process: (name, remark, (column, step) of each step)."""
CROSSINGS = ((0, 1, 1, 1, "the file"), (1, 3, 0, 3, "pixels"), (0, 3, 2, 1, "prompt tokens and pixels, through the engine"))  # fmt: skip
"""(lane, column) to (lane, column), and what goes over."""


def way_of_a_picture(colours: dict[str, str]) -> str:
    """From the request to the embeddings of the prompt."""
    left, step, wide, high = 170, 178, 160, 34
    tops = (8, 104, 224)
    parts: list[str] = []
    for (name, about, steps), y in zip(LANES, tops, strict=True):
        parts += [box(1, y, WIDTH - 2, 62, colours["card"], f'rx="10" stroke="{colours["line"]}"'), text(16, y + 27, name, colours["text"], 15, 'font-weight="600"'), text(16, y + 46, about, colours["dim"], 11)]  # fmt: skip
        for (column, words), after in zip(steps, [*steps[1:], None], strict=True):
            x = left + column * step
            parts += [box(x, y + 14, wide, high, colours["quire"], 'rx="6"'), text(x + wide / 2, y + 36, words, colours["on"], 13, 'text-anchor="middle"')]  # fmt: skip
            if after is not None and after[0] == column + 1:
                parts.append(f'<path d="M{x + wide} {y + 31}h{step - wide}m-5 -5l5 5l-5 5" stroke="{colours["dim"]}" fill="none" stroke-width="1.5"/>')  # fmt: skip
    for lane, column, to_lane, to_column, words in CROSSINGS:
        down = to_lane > lane
        x, end = (left + place * step + wide / 2 + (20 if down else -20) for place in (column, to_column))  # fmt: skip
        y, stop = (tops[lane] + 48, tops[to_lane] + 14) if down else (tops[lane] + 14, tops[to_lane] + 48)  # fmt: skip
        if lane + 2 == to_lane:  # around the lane between them
            turn, x = tops[to_lane] - 26, WIDTH - 8
            start = left + column * step + wide
            path, label = f"M{start} {y - 17}H{x}V{turn}H{end:.0f}V{stop}", (end + 12, turn + 16)
        else:
            path, label = f"M{x:.0f} {y}V{stop}", (x + 10, (y + stop) / 2 + 4)
        tip = -6 if down else 6
        parts += [f'<path d="{path}m-5 {tip}l5 {-tip}l5 {tip}" stroke="{colours["vllm"]}" fill="none" stroke-width="1.5"/>', text(*label, words, colours["dim"], 12)]  # fmt: skip
    return drawing(
        tops[-1] + 70, "The way of a picture from a request to the embeddings of its prompt", parts
    )


DRAWN, RIGHT, WRONG = "quire", "vllm", "card"
STEPS = (
    ("without", [[(word, DRAWN)] for word in ("Once", "upon", "a", "time", ",")]),
    ("with", [[("Once", DRAWN)], [("upon", RIGHT), ("a", RIGHT), ("time", RIGHT), ("the", WRONG), (",", DRAWN)]]),
)  # fmt: skip
"""Words of each step. A step draws one token more than it has right guesses: at the place of the first wrong one."""


def guesses(colours: dict[str, str]) -> str:
    """The same five tokens in five steps, and in two with guesses."""
    parts, y, column = [], 4.0, 74
    for kind, steps in STEPS:
        parts.append(text(0, y + 12, f"{kind} speculative decoding: {len(steps)} steps", colours["text"], 14, 'font-weight="600"'))  # fmt: skip
        x, y = 0.0, y + 24
        for number, words in enumerate(steps, start=1):
            wide = column * len(words) + 12
            parts += [box(x, y, wide, 62, colours["card"], f'rx="8" stroke="{colours["line"]}"'), text(x + 8, y + 17, f"step {number}", colours["dim"], 11)]  # fmt: skip
            for place, (word, kind_of_token) in enumerate(words):
                left, wrong = x + 8 + place * column, kind_of_token == WRONG
                ink = colours["dim" if wrong else "on"]
                more = 'text-anchor="middle"' + (' text-decoration="line-through"' if wrong else "")
                parts += [box(left, y + 26, column - 6, 26, colours[kind_of_token], f'rx="4" stroke="{colours["line"]}"'), text(left + (column - 6) / 2, y + 44, word, ink, 14, more)]  # fmt: skip
            x += wide + 12
        y += 84
    for place, (words, fill) in enumerate((("drawn", DRAWN), ("guessed, and right", RIGHT), ("guessed, and wrong: dropped", WRONG))):  # fmt: skip
        parts += [box(place * 190, y - 6, 12, 12, colours[fill], f'stroke="{colours["line"]}"'), text(place * 190 + 18, y + 5, words, colours["text"], 13)]  # fmt: skip
    return drawing(y + 14, "Five tokens in five steps, or in two steps with guesses", parts)


def pictures() -> Iterator[tuple[Path, str]]:
    for theme, colours in PALETTES.items():
        yield FOLDER / f"peers-{theme}.svg", chart(colours)
        yield FOLDER / f"blocks-{theme}.svg", diagram(colours)
        yield FOLDER / f"splits-{theme}.svg", splits(colours)
        yield FOLDER / f"guesses-{theme}.svg", guesses(colours)
        yield FOLDER / f"way-of-a-picture-{theme}.svg", way_of_a_picture(colours)


def main(check: bool) -> int:
    stale = [path for path, made in pictures() if not path.exists() or path.read_text(encoding="utf-8") != made]  # fmt: skip
    if check:
        print("\n".join(f"{path.name} is not current: python -m tools.readme_pictures" for path in stale))  # fmt: skip
        return bool(stale)
    FOLDER.mkdir(exist_ok=True)
    for path, made in pictures():
        path.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
