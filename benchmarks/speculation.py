"""`python -m benchmarks speculation`: the speed of speculative decoding, beside the same engine without it.

Within each round the engines of a piece take turns, so that other load on the machine slows all; medians of the rounds' ratios
count. A prompt is computed once, in the round that warms up: the prefix cache has it later, so a round times the
decoding. Every run compares the text with that without speculation.

`--only` runs some pieces, each of which takes less than 200 seconds after `--prepare`. A piece replaces its rows in the
result file of the day. The checkpoints are in `speculation_models.py`; `quire-tiny` answers its own tasks.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import roofline, speculation_peers
from benchmarks.peers.run import PATIENCE_S
from benchmarks.result_files import commit
from benchmarks.shapes import SHAPES
from benchmarks.speculation_models import damped, transcribing
from benchmarks.speculation_prompts import SOURCE, TASKS, tasks, texts, transcribed
from quire.errors import ConfigError, QuireError
from quire.protocol.request import EngineRequest
from quire.protocol.sampling_params import SamplingParams

ENDS = [0, 2]  # of quire-tiny's answers
LOOKUPS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_min": 1, "prompt_lookup_max": 4},
    # without the trees of past answers: each round asks the same
    "suffix": {"method": "suffix", "num_speculative_tokens": 7, "suffix_decoding_max_cached_requests": 0, "suffix_decoding_max_spec_factor": 8.0},
}  # fmt: skip
HEADS: dict[str, dict[str, Any]] = {
    "draft_model": {"method": "draft_model", "model": "quire-tiny-draft", "num_speculative_tokens": 3, "quantization": "int8"},
    "ngram, then draft_model": {
        "method": "ngram,draft_model", "model": "quire-tiny-draft", "num_speculative_tokens": 7, "quantization": "int8",
        "prompt_lookup_min": 2, "prompt_lookup_max": 4,
    },
    "eagle3": {"method": "eagle3", "model": "quire-tiny-eagle3", "num_speculative_tokens": 3},
    "mtp": {"method": "mtp", "model": "quire-tiny-mtp", "num_speculative_tokens": 3},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """Requests for one engine without speculation, and one for each drafter."""

    workload: str
    model: str
    prompts: list[list[int]]
    output: int
    clients: int
    drafters: dict[str, dict[str, Any]]
    goal: float
    stops: tuple[int, ...] = ()  # tokens that end an answer
    block_size: int | None = None  # of the KV cache, which keeps full blocks of prompts

    @property
    def longest(self) -> int:
        return max(map(len, self.prompts)) + self.output + 8


@dataclass(slots=True)
class Runs:
    """The rounds of one engine."""

    seconds: list[float] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)  # of the last round, by request
    counts: dict[str, float] = field(default_factory=dict)


class Server:
    """An engine in this process, and clients that send their next request when an answer ends, also over the end of a round."""

    def __init__(self, case: Case, speculative: dict[str, Any], cache_bytes: int):
        from quire.config.engine import EngineConfig
        from quire.engine.build import make_client

        config = EngineConfig.from_keywords(
            model=case.model, dtype="bfloat16", skip_tokenizer_init=True, max_model_len=case.longest,
            max_num_seqs=case.clients, kv_cache_memory_bytes=cache_bytes, speculative_config=speculative, block_size=case.block_size,
            disable_log_stats=True,
        )  # fmt: skip
        self.case, self.client = case, make_client(config)
        self.runs = Runs(tokens=[[] for _ in case.prompts])
        self.numbers = itertools.count()
        self.answers: dict[str, list[int]] = {}  # by id, of the requests that run
        self.params = SamplingParams(
            temperature=0.0, max_tokens=case.output, ignore_eos=True, seed=0, detokenize=False,
            stop_token_ids=list(case.stops),
        )  # fmt: skip

    def submit(self) -> None:
        """The next prompt; the first follows the last."""
        number = next(self.numbers)
        prompt = self.case.prompts[number % len(self.case.prompts)]
        self.answers[f"{number}"] = []
        self.client.submit(EngineRequest(f"{number}", prompt, self.params))

    def round(self) -> float:
        """Seconds until as many answers ended as there are prompts. All clients are busy all the time.

        Raises:
            RuntimeError: a request failed.
        """
        before, start, left = self.counts(), time.perf_counter(), len(self.case.prompts)
        while len(self.answers) < self.case.clients:
            self.submit()
        while left > 0:
            for output in self.client.outputs():
                if output.error is not None:
                    raise RuntimeError(output.error)
                self.answers[output.id] += output.tokens
                if output.finish is not None:
                    left -= 1
                    number = int(output.id) % len(self.case.prompts)
                    self.runs.tokens[number] = self.answers.pop(output.id)
                    self.submit()
        seconds = time.perf_counter() - start
        self.runs.counts = {name: n - before.get(name, 0) for name, n in self.counts().items()}
        return seconds

    def counts(self) -> dict[str, float]:
        return dict(self.client.call("stats").get("counts", {}))


def measure(case: Case, rounds: int) -> list[dict[str, Any]]:
    """A row for each drafter; one that cannot run has the reason."""
    rows: list[dict[str, Any]] = []
    servers: dict[str, Server] = {}
    about = {"workload": case.workload, "clients": case.clients, "goal": case.goal}
    size = cache_bytes(case)
    try:
        for name, speculative in {"plain": {}, **case.drafters}.items():
            try:
                servers[name] = Server(case, speculative, size)
            except QuireError as why:
                rows.append({**about, "drafter": name, "failed": str(why)})
        for number in range(rounds + 1):
            for server in servers.values():
                seconds = server.round()
                if number:  # the first round warms up
                    server.runs.seconds.append(seconds)
        plain = servers.pop("plain")
        rows += [{**about, "drafter": name, **row(plain.runs, one.runs)} for name, one in servers.items()]  # fmt: skip
        plain.client.close()
    finally:
        for server in servers.values():
            server.client.close()
    return rows


def cache_bytes(case: Case) -> int:
    """Of keys and values in bfloat16: room for all clients, and for the prompts and answers that are cached."""
    from quire.config.load import LoadConfig
    from quire.config.model import ModelConfig
    from quire.models.checkpoint_locator import locate

    folder = Path(locate(ModelConfig(model=case.model), LoadConfig()))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    token = 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    requests = len(case.prompts) + case.clients
    return int(1.3 * token * requests * (case.longest + 32)) + (16 << 20)


def row(plain: Runs, own: Runs) -> dict[str, Any]:
    """Speeds in tokens a second, their ratio by rounds, and what became of the drafts of the last round."""
    ratios = [a / b for a, b in zip(plain.seconds, own.seconds, strict=True)]
    generated = sum(map(len, own.tokens))
    drafted = own.counts.get("spec_decode_num_draft_tokens", 0.0)
    accepted = own.counts.get("spec_decode_num_accepted_tokens", 0.0)
    return {
        "plain_tokens_per_s": round(sum(map(len, plain.tokens)) / statistics.median(plain.seconds), 1),
        "tokens_per_s": round(generated / statistics.median(own.seconds), 1),
        "speed": round(statistics.median(ratios), 3),
        "speeds": [round(ratio, 3) for ratio in ratios],
        "accepted": round(accepted / drafted, 3) if drafted else None,
        "accepted_of_output": round(accepted / max(generated, 1), 3),
        "same_text": plain.tokens == own.tokens,
    }  # fmt: skip


# ------------------------------------------------------------------------------------ pieces


def _damped(given: argparse.Namespace, clients: int) -> list[dict[str, Any]]:
    target, draft = damped(SHAPES[given.shape], given.cache)
    rng, goal = random.Random(clients), {1: 2.0, 4: 1.7, 32: 1.0}[clients]
    vocabulary = SHAPES[given.shape].vocab
    # Answers differ in how many draft tokens are right: clients that have theirs ask on while others wait for theirs.
    requests = clients * (4 if clients < 8 else 2)
    prompts = [[rng.randrange(vocabulary) for _ in range(32)] for _ in range(requests)]
    speculative = {
        "method": "draft_model", "model": str(draft), "num_speculative_tokens": given.drafts,
        "quantization": given.draft_quantization,
    }  # fmt: skip
    output = given.output or (64 if clients < 8 else 32)
    drafters = {"draft_model": speculative}
    case = Case("damped, first layers as draft", str(target), prompts, output, clients, drafters, goal)  # fmt: skip
    return measure(case, given.rounds)


def _transcribing(given: argparse.Namespace, kind: str, clients: int) -> list[dict[str, Any]]:
    target = transcribing(SHAPES[given.shape], given.cache)
    output = given.output or (SOURCE if clients < 8 else 48)
    prompts = transcribed(kind, SHAPES[given.shape].vocab, clients)
    goal = 2.0 if clients == 1 else 0.97
    case = Case(f"{kind}, transcribing", str(target), prompts, output, clients, LOOKUPS, goal)
    return measure(case, given.rounds)


def _tiny(
    given: argparse.Namespace, clients: int, drafters: dict[str, dict[str, Any]], goal: float
) -> list[dict[str, Any]]:
    rows = []
    for kind in TASKS:
        prompts = tasks(kind, max(4 * clients, 16))
        case = Case(f"{kind}, quire-tiny", "quire-tiny", prompts, given.output or 200, clients, drafters, goal, tuple(ENDS), block_size=16)  # fmt: skip
        rows += measure(case, given.rounds)
    return rows


def _host(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Microseconds for each token that the drafters read, and propose for: 32 rows of a text that repeats."""
    rows = []
    for name, options in LOOKUPS.items():
        spent = [host_seconds(options) for _ in range(given.rounds)]
        cost = 1e6 * statistics.median(spent)
        rows.append({"workload": "host cost", "clients": 32, "drafter": name, "us_per_token": round(cost, 2), "goal": 10.0})  # fmt: skip
    return rows


def host_seconds(options: dict[str, Any], num_rows: int = 32, steps: int = 200) -> float:
    """Seconds a token of a drafter: each step, each row gets a token, and proposals are asked for."""
    drafter = speculation_peers.host_drafter(options)
    read = [prompt + answer for prompt, answer in texts("json", 30_000, num_rows)]
    for at, text in enumerate(read):
        drafter.enter(at, text, b"")
    limits = dict.fromkeys(range(num_rows), 7)
    drafter.propose_all(limits)
    start = time.perf_counter()
    for step in range(steps):
        for at, text in enumerate(read):
            drafter.extend(at, [text[step % len(text)]])
        drafter.propose_all(limits)
    return (time.perf_counter() - start) / (steps * num_rows)


Piece = Callable[[argparse.Namespace], list[dict[str, Any]]]


def pieces() -> dict[str, Piece]:
    """Name -> what returns its rows."""
    found: dict[str, Piece] = {f"damped-{n}": partial(_damped, clients=n) for n in (1, 4, 32)}
    for kind, n in itertools.product(TASKS, (1, 32)):
        found[f"{kind}-{n}"] = partial(_transcribing, kind=kind, clients=n)
    found["tiny-1"] = partial(_tiny, clients=1, drafters=LOOKUPS, goal=2.0)
    found["tiny-32"] = partial(_tiny, clients=32, drafters=LOOKUPS, goal=0.97)
    found["tiny-heads"] = partial(_tiny, clients=1, drafters=HEADS, goal=1.25)
    for n in (8, 32):  # those that do not pay must not cost much
        found[f"tiny-heads-{n}"] = partial(_tiny, clients=n, drafters=HEADS, goal=0.97)
    found["host"] = _host
    for name in speculation_peers.PEERS:
        found[name] = partial(speculation_peers.compare, peer=name)
    return found


# ------------------------------------------------------------------------------------ results


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks speculation", description=__doc__)
    add, known = parser.add_argument, pieces()
    add("--only", nargs="+", choices=known, metavar="PIECE", help=f"of {', '.join(known)}; unset: all")  # fmt: skip
    add("--shape", default="qwen3-0.6b", choices=sorted(SHAPES), help="of the damped and the transcribing model")  # fmt: skip
    add("--drafts", type=int, default=4, help="num_speculative_tokens of the damped draft model")
    add("--draft-quantization", help="of the damped draft model, such as int8; unset: bfloat16")
    add("--rounds", type=int, default=5)
    add("--output", type=int, help="tokens of an answer; unset: as the piece says")
    add("--cache", type=Path, default=Path(tempfile.gettempdir()) / "quire-bench", help="folder of the checkpoints")  # fmt: skip
    add("--peers", type=Path, default=Path(".cache/peers"), help="folder of the peers' environments")  # fmt: skip
    add("--scripts", type=Path, default=Path("benchmarks/peers"), help="folder of their scripts")
    add("--patience", type=float, default=PATIENCE_S, help="seconds for a peer's start, and for a turn")  # fmt: skip
    add("--prepare", action="store_true", help="make the checkpoints and do nothing more")
    add("--out", type=Path, help="folder of the result file of the day; unset: print only")
    given = parser.parse_args(argv)
    given.command = " ".join(["python -m benchmarks speculation", *argv])
    if given.prepare:
        print(
            *damped(SHAPES[given.shape], given.cache),
            transcribing(SHAPES[given.shape], given.cache),
        )
        return 0
    try:
        for name in given.only or known:
            rows = known[name](given)
            print(table(rows), flush=True)
            if given.out is not None:
                print(f"kept in {keep(given.out, name, given.command, rows)}", flush=True)
    except QuireError as why:
        print(f"python -m benchmarks speculation: error: {why}", file=sys.stderr)
        return 2 if isinstance(why, ConfigError) else 1
    return 0


def keep(folder: Path, piece: str, command: str, rows: list[dict[str, Any]]) -> Path:
    """Put a piece's rows into folder/DATE-speculation-MACHINE.json, and write the page beside it."""
    about, date = roofline.describe(), time.strftime("%Y-%m-%d", time.gmtime())
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{date}-speculation-{roofline.slug(about)}.json"
    result: dict[str, Any] = {"date": date, "pieces": {}}
    if path.exists():
        result = json.loads(path.read_text(encoding="utf-8"))
    result["pieces"][piece] = {"command": command, "commit": commit(), "machine": about, "rows": rows}  # fmt: skip
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    lines = [
        f"# Speculative decoding, {date}", "",
        f"Machine: {about['cpu']}, {about['cores']} cores, kernels {about['kernels']}; torch {about['torch']}.",
    ]  # fmt: skip
    for name, one in result["pieces"].items():
        lines += ["", f"## {name}", "", f"`{one['command']}`, commit {one['commit']}, load {one['machine']['load']:.1f} at the end.", "", table(one["rows"])]  # fmt: skip
    path.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


COLUMNS = {
    "workload": "workload", "clients": "clients", "drafter": "drafter", "plain_tokens_per_s": "plain, tokens/s",
    "tokens_per_s": "tokens/s", "us_per_token": "us a token", "speed": "speed", "goal": "goal", "accepted": "drafts accepted",
    "accepted_of_output": "of the output", "same_text": "same text", "failed": "could not run",
}  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table of the columns that the rows have."""
    names = [name for name in COLUMNS if any(row.get(name) is not None for row in rows)]
    lines = [" | ".join(COLUMNS[name] for name in names), " | ".join("---" for _ in names)]
    lines += [" | ".join(_cell(row.get(name)) for name in names) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return ("no", "yes")[value] if isinstance(value, bool) else str(value)
