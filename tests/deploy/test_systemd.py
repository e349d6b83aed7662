"""deploy/systemd and deploy/quire.example.yaml: systemd accepts the unit, and the server its flags."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from quire import env
from quire.config.flags import parse
from quire.config.options import options

DEPLOY = Path(__file__).parents[2] / "deploy"
UNIT = (DEPLOY / "systemd/quire.service").read_text(encoding="utf-8")
EXAMPLE = DEPLOY / "quire.example.yaml"


def test_the_example_is_a_config_file():
    config = parse(["--config", str(EXAMPLE)])
    assert (config.model.model, config.server.port, config.scheduler.max_num_seqs) == (
        "quire-tiny",
        8000,
        64,
    )


def test_the_lines_that_are_commented_out_are_flags_too(tmp_path: Path):
    text = re.sub(
        r"^# (?=[a-z][a-z-]+: )", "", EXAMPLE.read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    (tmp_path / "all.yaml").write_text(text)
    config = parse(["--config", str(tmp_path / "all.yaml")])
    assert config.model.served_names == ["default", "quire-tiny"]
    assert config.model.quantization == "int8"


def test_the_unit_runs_the_server_with_names_that_exist():
    (command,) = re.findall(r"^ExecStart=\S+/quire serve (.*)$", UNIT, re.MULTILINE)
    assert command == "--config /etc/quire/quire.yaml"
    for name in re.findall(r"QUIRE_(\w+)", UNIT):
        assert name in env.VARIABLES
    (stop,) = re.findall(r"^TimeoutStopSec=(\d+)", UNIT, re.MULTILINE)
    assert int(stop) >= parse(["--config", str(EXAMPLE)]).server.shutdown_timeout + 10
    assert "shutdown_timeout" in options()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here")
def test_systemd_accepts_the_unit(tmp_path: Path):
    """The program and the user are not on this machine, so the unit is checked with others."""
    text = UNIT.replace("/opt/quire/bin/quire", "/bin/true").replace("User=quire", "User=root").replace("Group=quire", "Group=root")  # fmt: skip
    (tmp_path / "quire.service").write_text(text)
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", str(tmp_path / "quire.service")], capture_output=True, text=True, timeout=60)  # fmt: skip
    assert [line for line in done.stderr.splitlines() if "quire.service" in line] == []
