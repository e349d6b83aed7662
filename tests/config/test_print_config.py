"""--print-config: what it prints is read by --config, and secrets are not printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.config.flags import parse


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        parse([*words, "--print-config"])
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_the_file_gives_the_same_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["m", "--max-model-len", "4K", "--served-model-name", "a: b", "ü", "--hf-overrides", '{"x": [1, {"y": null}]}',
             "--no-enable-prefix-caching", "--gpu-memory-utilization", "0.5", "--kv-cache-memory-bytes", "2G"]  # fmt: skip
    file = tmp_path / "c.yaml"
    file.write_text(printed(capsys, *words), encoding="utf-8")
    assert parse(["--config", str(file)]) == parse(words)


def test_only_given_values_are_printed(capsys: pytest.CaptureFixture[str]):
    assert printed(capsys, "quire-tiny", "--port", "9000").splitlines()[1:] == ["port: 9000"]


def test_secrets_are_not_printed(capsys: pytest.CaptureFixture[str]):
    said = printed(capsys, "--api-key", "s3cret-1", "--hf-token", "s3cret-2")
    assert "s3cret" not in said
    assert "# api-key: given" in said
