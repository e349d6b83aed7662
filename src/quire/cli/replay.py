"""`quire replay FOLDER`: run the last steps of an engine that died again, and report which of them differ or fail.

Builds a worker for the model of --model, with the configuration in the recording. Takes neither the model's path nor
code to run from the recording, so a recording of unknown origin is safe to replay. It contains the tokens of prompts
and answers: treat it like your users' data.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path

from quire.config.recording import as_recorded, config_of, from_recording
from quire.engine import flight_recorder
from quire.engine.replay import Replayed, replay
from quire.engine.supervisor import CONFIG
from quire.errors import ConfigError, QuireError
from quire.features.lora.control import load_adapters
from quire.logging import configure, get_logger
from quire.models.checkpoint_locator import find_adapter

log = get_logger(__name__)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="quire replay", description=__doc__)
    parser.add_argument(
        "folder", type=Path, help="the recording's folder, which the log names when an engine dies"
    )
    parser.add_argument(
        "--model",
        required=True,
        help="the model of the recorded engine: a directory or a hub id",
    )
    parser.add_argument(
        "--lora-path",
        nargs="+",
        default=[],
        help="the directories of the adapters of the recorded requests",
    )
    args = parser.parse_args(argv)
    configure("replay")
    try:
        recording = flight_recorder.read_recording(args.folder)
        if recording is None:
            return refused(f"no recording in {args.folder}")
        if ids := sorted(recording.with_media()):
            return refused(
                f"the request {ids[0]!r} has embeddings or media, and a recording has no bytes of them: it cannot be replayed"
            )
        recorded = from_recording((args.folder / CONFIG).read_bytes())
        for name in recorded.left_out:
            log.warning(
                "the recorded engine used %s, which is not imported: results may differ", name
            )
        from quire.engine.build_executor import build_executor
        from quire.engine.enabled_features import enabled_features
        from quire.engine.resolve import resolve_config

        config = config_of(recorded, args.model, len(args.lora_path))
        adapters = [find_adapter(path, config.load) for path in args.lora_path]
        resolved = as_recorded(resolve_config(config), recorded)
    except (OSError, ValueError, QuireError) as why:
        return refused(str(why))
    executor = build_executor(resolved, enabled_features(resolved))
    try:
        load_adapters(executor, adapters, recording.adapters())
        return show(replay(recording, executor, resolved.max_num_batched_tokens))
    except ConfigError as why:
        return refused(str(why))
    finally:
        executor.close()


def refused(why: str) -> int:
    print(f"quire replay: error: {why}", file=sys.stderr)
    return 2


def show(steps: Iterable[Replayed]) -> int:
    """Print a line per step; 1 if a step failed or its result differs from the recorded one."""
    count = wrong = 0
    for step in steps:
        count += 1
        tokens = sum(item.num_tokens for item in step.plan.work)
        head = f"step {step.plan.step}: {len(step.plan.work)} rows, {tokens} tokens"
        if step.error is not None:
            print(f"{head}: failed")
            traceback.print_exception(step.error)
            wrong += 1
        elif step.recorded is None:
            print(f"{head}: succeeds; the recording has no result to compare")
        elif step.differs:
            print(
                f"{head}: recorded {step.recorded.tokens}, now {step.result.tokens if step.result else None}"
            )
            wrong += 1
        else:
            print(f"{head}: same")
    print(f"{count} steps, {wrong} failed or different")
    return 1 if wrong else 0
