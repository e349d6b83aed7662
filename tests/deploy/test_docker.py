"""deploy/docker: the Dockerfile, read as text, and its steps, run in a clean environment as another user would.

No container engine is needed, and none is used: what only a build can show (the base image, apt, layers) is not tested.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from quire.config.flags import parse
from quire.server.app import ROUTES
from quire.server.middleware import OPEN

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "docker"


class Stage(NamedTuple):
    """One FROM with its instructions: (name in capitals, the rest of the line)."""

    name: str
    base: str
    steps: list[tuple[str, str]]

    def of(self, instruction: str) -> list[str]:
        return [rest for name, rest in self.steps if name == instruction]


def stages() -> dict[str, Stage]:
    text = re.sub(r"^\s*#.*\n", "", (FOLDER / "Dockerfile").read_text(), flags=re.M)
    found: dict[str, Stage] = {}
    for line in re.sub(r"\\\n", " ", text).splitlines():
        instruction, _, rest = line.strip().partition(" ")
        if instruction == "FROM":
            base, _, name = rest.partition(" AS ")
            stage = found[name] = Stage(name, base, [])
        elif instruction and found:
            stage.steps.append((instruction, " ".join(rest.split())))
    return found


def test_every_stage_uses_existing_stages_and_files():
    made = stages()
    for number, stage in enumerate(made.values()):
        assert stage.base in list(made)[:number] or stage.base.startswith("python:${PYTHON}-")
        for line in stage.of("COPY"):
            *words, _ = line.split()
            if words[0].startswith("--from="):
                assert words[0].removeprefix("--from=") in made
            else:
                for word in words:
                    assert (ROOT / word).exists(), word


def test_copied_files_are_in_the_build_context():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    sent = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    copied = {word for line in stages()["wheel"].of("COPY") for word in line.split()[:-1]}
    assert ignored[0] == "*"
    assert sent == copied


def test_the_default_image_is_the_one_for_cpus():
    assert list(stages())[-1] == "cpu"


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_the_server_runs_unprivileged_with_the_pinned_torch(target: str):
    made = stages()
    assert made[target].steps[-1] == ("USER", "2000:0")
    wanted = re.search(r"^TORCH \?= (\S+)", (ROOT / "Makefile").read_text(), re.M)[1]
    assert any(wanted in line for line in made[target].of("RUN"))


def test_the_entry_point_accepts_flags_and_its_health_check_needs_no_key():
    base = stages()["base"]
    [entry], [default] = base.of("ENTRYPOINT"), base.of("CMD")
    assert json.loads(entry) == ["tini", "--", "quire", "serve"]
    assert parse(json.loads(default)).model.model == "quire-tiny"
    path = re.search(r"127\.0\.0\.1:8000(/[a-z/]+)", base.of("HEALTHCHECK")[0])[1]
    assert path in OPEN & {path for _, path, _ in ROUTES}


def test_compose_builds_a_stage_and_mounts_its_writable_paths():
    service = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]["quire"]
    build, stage = service["build"], stages()["base"]
    assert build["target"] in stages()
    assert (FOLDER / build["context"] / build["dockerfile"]).resolve() == FOLDER / "Dockerfile"
    environment = dict(part.split("=") for part in stage.of("ENV")[0].split())
    writable = {mount.split(":")[0] for mount in service["tmpfs"]}
    writable |= {mount.split(":")[1] for mount in service["volumes"] if not mount.endswith(":ro")}
    assert service["read_only"]
    assert {"/tmp", environment["QUIRE_CACHE_ROOT"], environment["HF_HOME"]} <= writable
    config = parse(
        [word.replace("${MODEL:-quire-tiny}", "quire-tiny") for word in service["command"]]
    )
    assert (
        int(service["stop_grace_period"].removesuffix("s")) >= config.server.shutdown_timeout + 10
    )
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])


def open_to_all(prefix: Path) -> bool:
    """Whether root runs the tests, and another user could run this environment's Python."""
    needed = (prefix, Path(sys.executable).resolve(), Path(pytest.__file__))
    folders = {parent for path in needed for parent in path.parents}
    return os.getuid() == 0 and all(folder.stat().st_mode & 0o001 for folder in folders)


@pytest.mark.slow
def test_the_image_writes_only_to_permitted_paths(tmp_path: Path):
    """The RUN lines with pip, in a copy of the files that COPY names; torch and the rest come from this environment."""
    source, prefix, home = tmp_path / "source", tmp_path / "prefix", tmp_path / "home"
    source.mkdir()
    made = stages()
    for line in made["wheel"].of("COPY"):
        *words, target = line.split()
        subprocess.run(["cp", "-r", *(ROOT / word for word in words), source / target], check=True)
    [wheel] = [line for line in made["wheel"].of("RUN") if line.startswith("pip wheel")]
    subprocess.run([sys.executable, "-m", "venv", prefix], check=True)
    here = next(path for path in sys.path if path.endswith("site-packages"))
    [site] = prefix.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(here)
    run = {"cwd": source, "check": True, "shell": True}
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment = {**own, "PATH": f"{prefix}/bin:{os.environ['PATH']}", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}  # fmt: skip
    wheels = tmp_path / "wheels"
    subprocess.run(wheel.replace("/wheels", str(wheels)), env=environment, **run)
    [install] = [line for line in made["cpu"].of("RUN") if "/wheels/" in line]
    install = install.partition("&&")[0].replace("/wheels", str(wheels))
    subprocess.run(f"{install} --no-deps --force-reinstall", env=environment, **run)

    for folder in (prefix, source):
        subprocess.run(["chmod", "-R", "a-w,a+rX", folder], check=True)
    home.mkdir(mode=0o777)
    home.chmod(0o777)
    before = sorted(prefix.rglob("*"))
    as_user = {"user": 2000, "group": 0, "extra_groups": []} if open_to_all(prefix) else {}
    kept = {"HOME": str(home), "QUIRE_CACHE_ROOT": str(home / "quire"), "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1", "PATH": environment["PATH"]}  # fmt: skip
    for command in ("quire", "vllm"):
        done = subprocess.run(
            [prefix / "bin" / command, "complete", "quire-tiny", "-q", "Once upon a time", "--max-tokens", "4"],
            env=kept, cwd="/", capture_output=True, text=True, timeout=300, **as_user,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        assert done.stdout.strip()
    assert sorted(prefix.rglob("*")) == before
    assert not list((home / "quire").rglob("*.so")), "the wheel should bring the kernels"
