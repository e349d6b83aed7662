"""`quire replay FOLDER`: run the last steps of an engine that died again, and say where they differ or fail.

Builds a worker from the configuration that lies beside the recording. The tokens of prompts and answers are in it:
treat it as you treat your users' data.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path

from quire.config.wire import from_wire
from quire.engine import flight
from quire.engine.host import CONFIG
from quire.engine.replay import Replayed, replay
from quire.errors import QuireError
from quire.logging import configure


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="quire replay", description=__doc__)
    parser.add_argument("folder", type=Path, help="what the engine's last words named")
    asked = parser.parse_args(argv)
    configure("replay")
    try:
        recording = flight.read(asked.folder)
        resolved = from_wire((asked.folder / CONFIG).read_bytes())
    except (OSError, ValueError, QuireError) as why:
        print(f"quire replay: error: {why}", file=sys.stderr)
        return 2
    if recording is None:
        print(f"quire replay: error: nothing is recorded in {asked.folder}", file=sys.stderr)
        return 2
    from quire.engine.assemble import build_compiler, build_executor

    executor = build_executor(resolved, build_compiler(resolved))
    try:
        return show(replay(recording, executor, resolved.max_num_batched_tokens))
    finally:
        executor.close()


def show(steps: Iterable[Replayed]) -> int:
    """Print a line a step; 1 if one failed or came out otherwise than it was recorded."""
    count = wrong = 0
    for step in steps:
        count += 1
        tokens = sum(item.num_tokens for item in step.plan.work)
        head = f"step {step.plan.step}: {len(step.plan.work)} rows, {tokens} tokens"
        if step.error is not None:
            print(f"{head}: fails")
            traceback.print_exception(step.error)
            wrong += 1
        elif step.recorded is None:
            print(f"{head}: runs here; the engine had no result of it")
        elif step.differs:
            print(
                f"{head}: gave {step.recorded.tokens}, gives {step.result.tokens if step.result else None}"
            )
            wrong += 1
        else:
            print(f"{head}: the same")
    print(f"{count} steps, {wrong} of them failed or came out otherwise")
    return 1 if wrong else 0
