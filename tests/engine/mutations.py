"""Break one rule of the middle room at a time and see whether the random workloads notice.

A change to the scheduler or the block manager adds a line here. `python tests/engine/mutations.py` runs all
by hand and prints what caught each; test_mutations.py does it in CI.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).parent
SOURCE = HERE.parents[1] / "src" / "quire"
PARTS = (
    "protocol",
    "kvcache",
    "scheduler",
    "engine",
    "logging.py",
    "env.py",
    "errors.py",
    "__init__.py",
)
TRIALS = 4000

SCHEDULER, BUILDING = "scheduler/scheduler.py", "scheduler/building.py"
MANAGER, POOL, HASHING = "kvcache/manager.py", "kvcache/pool.py", "kvcache/hashing.py"
QUEUES, FAIR = "scheduler/queues.py", "scheduler/fair.py"

# name -> (file, what stands there, what is put there)
MUTATIONS: dict[str, tuple[str, str, str]] = {
    "publish before the plan is final": (
        SCHEDULER,
        "                building.take(request, n, added, self.limits.drafts > 0)\n",
        "                building.take(request, n, added, self.limits.drafts > 0)\n"
        "                self.kv.publish(request)\n",
    ),
    "re-admitted with tokens pending": (SCHEDULER, " or request.pending:\n", ":\n"),
    "rejected drafts stay computed": (SCHEDULER, "request.computed -= most - len(tokens)", "pass"),
    "draws of tokens that are certain count": (
        SCHEDULER, "void(self.in_flight, request, len(certain))", "pass",
    ),
    "what is certain is dropped": (
        SCHEDULER, "tokens = tokens + self._extend(request, certain)", "pass",
    ),
    "all draws in flight are void": (BUILDING, "                count -= 1\n", ""),
    "no limit to running ahead": (
        SCHEDULER,
        "if request.pending and (length >= request.limit or not self.limits.run_ahead)",
        "if request.pending and not self.limits.run_ahead",
    ),
    "running ahead where it may not": (SCHEDULER, "or not self.limits.run_ahead)", "or False)"),
    "preemption keeps the work of this plan": (SCHEDULER, "        building.undo(request)\n", ""),
    "undo forgets the pending tokens": (BUILDING, "                request.pending -= counted\n", ""),
    "admission after preemption in the same plan": (
        SCHEDULER, "if not building.preempted:", "if True:",
    ),
    "preempts the first come": (
        SCHEDULER, "max(self.running, key=lambda r: r.order)", "min(self.running, key=lambda r: r.order)",
    ),
    "the queue forgets who came first": (QUEUES, "return -priority, -number", "return -priority, number"),
    "a tenant's end is not told": (SCHEDULER, "        self.waiting.ended(request)\n", ""),
    "the oldest gives way": (FAIR, "return max((r for", "return min((r for"),
    "a gate's stop is a skip": (
        SCHEDULER,
        "            if not n or not self.kv.admit(request, prefix, hit, n):\n                break\n",
        "            if not n or not self.kv.admit(request, prefix, hit, n):\n                continue\n",
    ),
    "a gate's skip is a stop": (
        SCHEDULER,
        "                    break  # skipped",
        "                    return  # skipped",
    ),
    "a gate is not asked": (
        SCHEDULER, "if not gate.ready(request):", "if False:",
    ),
    "a gate is not told who left": (
        SCHEDULER,
        "        for gate in self.gates:\n            gate.leave(request)\n",
        "",
    ),
    "a gate is not told who gave up": (SCHEDULER, "                gate.gave_up(request)\n", "                pass\n"),
    "rows are not given back": (SCHEDULER, "        self.free_rows.append(request.row)\n", ""),
    "workers are not told which rows are free": (
        SCHEDULER, "        self.left.append(request.row)\n", "",
    ),
    "stops before min_tokens": (SCHEDULER, "len(known) > request.min_length", "True"),
    "tokens after the end": (SCHEDULER, "            tokens = tokens[:count]\n", ""),
    "a failed row's blocks stay published": (
        SCHEDULER,
        "        self.kv.retract(request)\n        self._end(request, \"error\")",
        "        self._end(request, \"error\")",
    ),
    "an abort forgets who waits": (
        SCHEDULER,
        "        else:\n            self.waiting.remove(request)\n",
        "",
    ),
    "a prefix match may cover all": (
        MANAGER, "most = (len(request.tokens) - 1)", "most = len(request.tokens)",
    ),
    "admission counts idle shared blocks as free": (MANAGER, "len(self.pool.free) - idle", "len(self.pool.free)"),
    "a prefix goes beyond a gap in a window": (
        MANAGER, "            count = min(gap for gap in gaps if gap >= 0)", "            return count",
    ),
    "a window is a block too narrow": (
        MANAGER,
        "range(spec.first_needed(position) // self.block_size - 1, -1, -1)",
        "range(spec.first_needed(position) // self.block_size, -1, -1)",
    ),
    "a window moves with tokens that may be taken back": (
        MANAGER,
        "position = min(request.computed, len(request.tokens) - 1)",
        "position = request.computed",
    ),
    "a window's blocks are released twice": (MANAGER, "                column[index] = NULL_BLOCK\n", ""),
    "blocks outside a window are kept": (
        MANAGER,
        "        if self.windows:\n            self._leave_windows(request)\n",
        "",
    ),
    "unknown tokens are published": (
        MANAGER, "full = min(request.computed, len(request.tokens))", "full = len(request.tokens)",
    ),
    "a taken block keeps its hash": (POOL, "        self.forget(block)\n        self.refs[block] = 1", "        self.refs[block] = 1"),
    "sharing leaves a block free": (POOL, "            del self.free[block]\n", "            pass\n"),
    "the hash ignores the adapter": (HASHING, '"" if adapter is None else', '"" if True else'),
    "the hash ignores the salt": (HASHING, '{len(salt)}:{salt}{named}', '{named}'),
    "the hash ignores the parent": (HASHING, "(hashes[-1] if hashes else root)", "root"),
}  # fmt: skip


def broken(name: str, folder: pathlib.Path) -> None:
    """Write the middle room into `folder`, with one rule broken."""
    for part in PARTS:
        source = SOURCE / part
        if source.is_dir():
            shutil.copytree(
                source, folder / "quire" / part, ignore=shutil.ignore_patterns("__pycache__")
            )
        elif source.exists():
            (folder / "quire").mkdir(exist_ok=True)
            shutil.copy(source, folder / "quire" / part)
    file, before, after = MUTATIONS[name]
    path = folder / "quire" / file
    text = path.read_text()
    if text.count(before) != 1:
        raise LookupError(f"{name}: the line to break occurs {text.count(before)} times in {file}")
    path.write_text(text.replace(before, after))


def survives(name: str) -> str | None:
    """None if the workloads still pass; else the last line of what caught it."""
    with tempfile.TemporaryDirectory() as folder:
        broken(name, pathlib.Path(folder))
        ran = subprocess.run(
            [sys.executable, "-B", str(HERE / "workload.py"), str(TRIALS)],
            env={**os.environ, "PYTHONPATH": folder},
            capture_output=True,
            text=True,
            timeout=120,
        )
    return ran.stderr.strip().splitlines()[-1] if ran.returncode else None


if __name__ == "__main__":
    for mutation in sys.argv[1:] or MUTATIONS:
        print(f"{mutation:52}", survives(mutation) or "SURVIVED", flush=True)
