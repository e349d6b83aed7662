"""`quire bench sweep serve`: a server for each set of server flags, and `bench serve` with each set of load flags.

Knows two command lines and two files of flags (JSON lists of objects), as `vllm bench sweep serve`. Does not know what
the commands do: the servers and the benchmarks are processes of their own.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from quire import env
from quire.bench import plot
from quire.errors import QuireError
from quire.processes.child import wait_or_kill

DEV_MODE = {"QUIRE_SERVER_DEV_MODE": "1", "VLLM_SERVER_DEV_MODE": "1"}
STOP_S = 60  # for a server to end after SIGTERM
NAME = "_benchmark_name"
READY, READY_S = "--ready-check-timeout-sec", "600"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser("quire bench sweep serve", allow_abbrev=False)
    made.add_argument("--serve-cmd", required=True, help="command that starts a server")
    made.add_argument(
        "--bench-cmd", required=True, help="command of the load: quire bench serve ..."
    )
    made.add_argument(
        "--after-bench-cmd",
        help="command to run after each load; unset: empty the server's caches",
    )
    made.add_argument("--serve-params", type=Path, help="JSON list of objects: flags of the server")
    made.add_argument("--bench-params", type=Path, help="JSON list of objects: flags of the load")
    made.add_argument("-o", "--output-dir", type=Path, default=Path("results"))
    made.add_argument("--num-runs", type=int, default=3, help="runs of each combination")
    made.add_argument("--plot", type=Path, metavar="NAME", help=plot.HELP)
    made.add_argument("--dry-run", action="store_true", help="print the commands only")
    return made


def main(argv: Sequence[str]) -> int:
    """Exit status 0; 1 if a load failed; 2 for a usage error."""
    options = parser()
    if argv[:1] != ["serve"] and "--help" not in argv:
        options.error("the kind of sweep is missing: quire bench sweep serve ...")
    given = options.parse_args(argv[1:] if argv[:1] == ["serve"] else argv)
    try:
        plot.check(given.plot)
        servers, loads = read_params(given.serve_params), read_params(given.bench_params)
    except (OSError, QuireError, ValueError) as why:
        options.error(str(why))
    folder = given.output_dir / time.strftime("%Y%m%d_%H%M%S")
    found: list[dict[str, Any]] = []
    for number, server in enumerate(servers):
        with running(shlex.split(given.serve_cmd) + flags(server), given.dry_run):
            for (index, load), run in product(enumerate(loads), range(given.num_runs)):
                path = folder / f"serve{number}-bench{index}" / f"run={run}.json"
                command = patient(shlex.split(given.bench_cmd) + flags(load))
                command += ["--save-result", "--result-dir", str(path.parent), "--result-filename", path.name]  # fmt: skip
                execute(command, given.dry_run)
                if path.is_file():
                    result = json.loads(path.read_text(encoding="utf-8"))
                    found.append({"run": run, "serve": server, "bench": load, **result})
                if given.after_bench_cmd:
                    execute(shlex.split(given.after_bench_cmd), given.dry_run)
                elif not given.dry_run:
                    empty_caches(command)
    if given.dry_run:
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(f"{len(found)} results in {folder / 'summary.json'}")
    if given.plot is not None:
        return draw(given.plot, found) or int(
            len(found) < len(servers) * len(loads) * given.num_runs
        )
    return 0 if len(found) == len(servers) * len(loads) * given.num_runs else 1


def draw(path: Path, found: Sequence[Mapping[str, Any]]) -> int:
    """The picture of the results; returns the exit status."""
    done = [one for one in found if one.get("completed")]
    try:
        if not done:
            raise QuireError("--plot: no request succeeded")
        plot.sweep(done, path)
    except QuireError as why:
        print(f"quire bench sweep: {why}", file=sys.stderr)
        return 1
    return 0


def read_params(path: Path | None) -> list[dict[str, Any]]:
    """The sets of flags in a file; without one, a set without flags.

    Raises:
        ValueError: neither a JSON list of objects nor an object of objects by name.
        OSError: the file cannot be read.
    """
    if path is None:
        return [{}]
    found = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(found, dict):
        found = [{NAME: name, **one} for name, one in found.items() if isinstance(one, dict)]
    if not isinstance(found, list) or not found or not all(isinstance(one, dict) for one in found):
        raise ValueError(
            f"{path}: must be a JSON list of objects, each with flags and their values"
        )
    return found


def flags(params: Mapping[str, Any]) -> list[str]:
    """{"max_num_seqs": 8, "ignore-eos": true, "goodput": ["a", "b"]} -> command line words."""
    words: list[str] = []
    for name, value in params.items():
        flag = f"--{name.replace('_', '-')}"
        if name == NAME or value is None:
            continue
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        elif isinstance(value, list):
            words += [flag, *map(str, value)]
        else:
            words += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    return words


def patient(command: list[str]) -> list[str]:
    """The server was started a moment ago: `quire bench serve` waits for it, also while nothing listens."""
    waits = any(word.replace("_", "-").startswith(READY) for word in command)
    return command if waits or command[1:3] != ["bench", "serve"] else [*command, READY, READY_S]


def execute(command: Sequence[str], dry: bool) -> None:
    print(shlex.join(command), flush=True)
    if not dry and (status := subprocess.run(command, check=False).returncode):
        print(f"quire bench sweep: the command ended with status {status}", file=sys.stderr)


def empty_caches(command: Sequence[str]) -> None:
    """All loads have the same prompts: the next one must not find them in the server's caches."""
    reader = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag, value in (("--base-url", None), ("--host", "127.0.0.1"), ("--port", "8000")):
        reader.add_argument(flag, default=value)
    address = reader.parse_known_args(command)[0]
    base = address.base_url or f"http://{address.host}:{address.port}"
    for route in ("/reset_prefix_cache", "/reset_mm_cache"):
        try:
            urlopen(Request(base.rstrip("/") + route, method="POST"), timeout=STOP_S).close()
        except (OSError, ValueError) as why:
            print(f"quire bench sweep: POST {base}{route}: {why}: the next load may find prompts of this one in the cache", file=sys.stderr)  # fmt: skip
            return


@contextmanager
def running(command: Sequence[str], dry: bool) -> Iterator[None]:
    """A server while its loads run, with the routes that empty caches; `bench serve` waits until it is ready."""
    print(shlex.join(command), flush=True)
    server = None if dry else subprocess.Popen(command, env=env.for_a_child(**DEV_MODE))
    try:
        yield
    finally:
        if server is not None:
            server.terminate()
            wait_or_kill(server, STOP_S)
