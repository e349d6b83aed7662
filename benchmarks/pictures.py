"""`python -m benchmarks pictures`: TTFT of text requests, alone and beside 64 requests with pictures, over HTTP.

The text requests arrive at a fixed rate, and stream. Beside them 64 requests arrive at once when the first text does, each with a JPEG of
about 1 MB of its own, which the server decodes, resizes and encodes. Both turns alternate on one server; no prompt and no picture is sent
twice. The model is a random LLaVA of a few MB in bfloat16, so that what the HTTP and media processes do counts; `--model` takes another.
Aim: the text's TTFT p95 beside pictures is at most 1.2 times as long as alone.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import random
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks import result_files, serving_cost
from quire.bench.serve import metrics
from quire.bench.serve.arrivals import Arrivals, run
from quire.bench.serve.endpoints import KINDS, BenchPrompt, RequestRecord, ask
from quire.bench.serve.http_client import HttpFailed, reason
from quire.errors import ConfigError, QuireError

AIM = 1.2
SHARE = 95.0  # percentile
TURNS = ("alone", "beside")
SPECIAL = ("<pad>", "<s>", "</s>", "<image>")
WIDTH, LAYERS, HEADS = 256, 4, 4
SIDE, PATCH = 336, 14
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endfor %}"
)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks pictures", description=__doc__)
    add = parser.add_argument
    add("--model", help="a vision-language model; unset: random weights")
    add("--pictures", type=int, default=64, metavar="N", help="requests with a picture, at once")
    add("--side", type=int, default=1024, metavar="PIXELS", help="of each picture")
    add("--texts", type=int, default=100, metavar="N", help="text requests of a turn")
    add("--rate", type=float, default=5.0, metavar="N", help="text requests per second")
    add("--output-len", type=int, default=8, metavar="TOKENS", help="of each request")
    add("--rounds", type=int, default=3, metavar="N", help="it prints the medians")
    add("--flags", default="--max-num-seqs 80", metavar="WORDS", help="more flags for the server")
    add("--cache", type=Path, default=Path(".cache"), help="folder of the random model")
    add("--out", type=Path, help="folder for the result; unset: print only")
    given = parser.parse_args(argv)
    try:
        if min(given.pictures, given.texts, given.rounds, given.output_len) < 1 or given.rate <= 0:
            raise ConfigError("--pictures, --texts, --rounds, --output-len and --rate: must be above 0")  # fmt: skip
        turns = asyncio.run(_measured(given))
    except QuireError as why:
        print(f"python -m benchmarks pictures: error: {why}", file=sys.stderr)
        return 2 if isinstance(why, ConfigError) else 1
    result = {
        "command": " ".join(["python -m benchmarks pictures", *argv]),
        "aim": AIM,
        "pictures": given.pictures,
        "turns": {name: [one.row() for one in turns[name]] for name in TURNS},
    }
    result_files.report(given.out, "pictures", "Text beside pictures", result, table(result))
    return 0


@dataclass(frozen=True, slots=True)
class Turn:
    """What the clients saw."""

    ttfts: list[float]  # seconds, of the text requests
    seconds: float  # until the last request with a picture ended

    def row(self) -> dict[str, float]:
        at = {f"p{share:.0f}_ttft_ms": 1e3 * float(np.percentile(self.ttfts, share)) for share in (50.0, SHARE)}  # fmt: skip
        return {name: round(value, 2) for name, value in {**at, "pictures_s": self.seconds}.items()}


async def _measured(given: argparse.Namespace) -> dict[str, list[Turn]]:
    model = given.model or str(checkpoint(given.cache / "pictures-llava"))
    command = f"{shlex.quote(sys.executable)} -m quire serve {{model}} --host 127.0.0.1 --port {{port}} {given.flags}"
    found: dict[str, list[Turn]] = {name: [] for name in TURNS}
    draw = random.Random(0)
    async with serving_cost.started("quire", command, model) as running:
        warm = [body(running.model, draw, given) for _ in range(2)]
        await _pictures(running, warm)
        for _ in range(given.rounds):
            for name in TURNS:
                count = given.pictures if name == "beside" else 0
                bodies = [body(running.model, draw, given) for _ in range(count)]
                texts = [_text(draw, given.output_len) for _ in range(given.texts)]
                found[name].append(turn := await _turn(running, texts, bodies, given.rate))
                print(f"{name}: {turn.row()}", flush=True)
    return found


async def _turn(
    running: serving_cost.Running, texts: list[BenchPrompt], bodies: list[bytes], rate: float
) -> Turn:
    kind, fixed = KINDS["openai"], {"model": running.model, "temperature": 0.0}

    async def one(number: int) -> RequestRecord:
        return await ask(running.server, kind, kind.path, texts[number], fixed, ignore_eos=True, clock=time.perf_counter)  # fmt: skip

    pictures = asyncio.create_task(_pictures(running, bodies))
    done, _ = await run(one, len(texts), Arrivals(rate=rate), 0, lambda _: None)
    seconds = await pictures
    if wrong := metrics.failures(done):
        raise HttpFailed(f"text requests: {wrong}")
    return Turn([each.ttft for each in done], seconds)


async def _pictures(running: serving_cost.Running, bodies: list[bytes]) -> float:
    """Seconds until all are answered. Raises HttpFailed: one is not."""
    began = time.perf_counter()
    asked = [running.server.ask("POST", "/v1/chat/completions", body, timeout=600) for body in bodies]  # fmt: skip
    for answer in await asyncio.gather(*asked):
        if answer.status != 200:
            raise HttpFailed(f"a request with a picture: {answer.status}: {reason(answer.body)}")
    return time.perf_counter() - began


def _text(draw: random.Random, output: int) -> BenchPrompt:
    text = "".join(draw.choices("abcdefghij ", k=64))
    return BenchPrompt(text, len(text), output)


def body(model: str, draw: random.Random, given: argparse.Namespace) -> bytes:
    """A chat with a picture of noise, whose JPEG is about a byte for each pixel."""
    from PIL import Image

    noise = np.random.default_rng(draw.getrandbits(32)).integers(0, 256, (given.side, given.side, 3), np.uint8)  # fmt: skip
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "JPEG", quality=92)
    url = f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is in this picture?"}]  # fmt: skip
    asked = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": given.output_len, "temperature": 0.0, "ignore_eos": True}  # fmt: skip
    return json.dumps(asked).encode()


def checkpoint(path: Path) -> Path:
    """A directory in the form of Transformers; made once."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlavaConfig, LlavaForConditionalGeneration, PreTrainedTokenizerFast

    if (done := path / "done").exists():
        return path
    words = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    common = {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}  # fmt: skip
    text = {
        "model_type": "llama",
        **common,
        "vocab_size": len(words),
        "max_position_embeddings": 4096,
    }
    tower = {"model_type": "clip_vision_model", **common, "image_size": SIDE, "patch_size": PATCH}
    config = LlavaConfig(text_config=text, vision_config=tower, image_token_index=SPECIAL.index("<image>"))  # fmt: skip
    torch.manual_seed(0)
    LlavaForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(path)
    backend = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    own = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>")  # fmt: skip
    own.chat_template = TEMPLATE
    own.save_pretrained(path)
    square = {"height": SIDE, "width": SIDE}
    pictures = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": SIDE}, "crop_size": square, "processor_class": "LlavaProcessor"}  # fmt: skip
    processor = {"processor_class": "LlavaProcessor", "patch_size": PATCH, "vision_feature_select_strategy": "default", "image_token": "<image>", "num_additional_image_tokens": 1}  # fmt: skip
    for name, content in (("preprocessor_config", pictures), ("processor_config", processor)):
        (path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    done.touch()
    return path


def table(result: dict[str, Any]) -> str:
    """A Markdown table of medians."""
    lines = ["| text requests | TTFT p50, ms | TTFT p95, ms | all pictures answered, s |", "|---|---|---|---|"]  # fmt: skip
    found = {}
    for name in TURNS:
        rows = result["turns"][name]
        found[name] = {key: median(row[key] for row in rows) for key in rows[0]}
        own = found[name]
        ended = f"{own['pictures_s']:.1f}" if name == "beside" else ""
        lines.append(f"| {name} | {own['p50_ttft_ms']:.1f} | {own['p95_ttft_ms']:.1f} | {ended} |")
    ratio = found["beside"]["p95_ttft_ms"] / found["alone"]["p95_ttft_ms"]
    lines += ["", f"p95 beside {result['pictures']} requests with pictures: {ratio:.2f}x (aim: at most {result['aim']}x)."]  # fmt: skip
    return "\n".join(lines)
