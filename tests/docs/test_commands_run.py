"""Every command of README.md and of docs/ runs as it is written, in an empty folder, with a PATH of .venv/bin and the system's folders.

`HOW` has a line for each command: how it is run, or why it is not. A command that has no line fails, and so does a line without a command.
Requests with curl are sent by `test_page_commands.py`.
"""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from server_process import Served
from test_page_commands import ROOT, Command, commands, split_variables

from tests.cli.test_terminal import Terminal

SYSTEM = "/usr/bin:/bin"
BIN = Path(sys.executable).parent  # `. .venv/bin/activate` puts it first
INSTALLS = "installs from the package index: CI runs make test in a fresh clone, and tests/deploy the script of make wheel"


def run(folder: Path, words: list[str], path: str = f"{BIN}:{SYSTEM}", **variables: str) -> str:
    """The output of a command that ends by itself."""
    done = subprocess.run(words, cwd=folder, env=environment(folder, path, **variables), capture_output=True, text=True, timeout=230)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def environment(folder: Path, path: str = f"{BIN}:{SYSTEM}", **variables: str) -> dict[str, str]:
    """What a login shell has, and no model hub."""
    return {
        "PATH": path,
        "HOME": str(folder),
        "LANG": "C.UTF-8",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        # The kernels that are compiled there already: each command would compile them for ten seconds or more.
        "QUIRE_CACHE_ROOT": os.environ.get(
            "QUIRE_CACHE_ROOT", str(Path.home() / ".cache" / "quire")
        ),
        **variables,
    }


class Program(Terminal):
    """A command in a pseudo-terminal."""

    def __init__(self, words: list[str], folder: Path, **variables: str):
        self.pid, self.file = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.execvpe(words[0], words, environment(folder, **variables))
        self.seen = ""


def prints(pattern: str) -> Callable[[Path, list[str]], None]:
    """The command ends, and its output has the pattern."""

    def check(folder: Path, words: list[str]) -> None:
        variables, words = split_variables(words)
        text = run(folder, words, **variables)
        assert re.search(pattern, text), text

    return check


def serves(model: str) -> Callable[[Path, list[str]], None]:
    """The command starts a server of this model; its port is free, since a test may not take 8000."""

    def check(folder: Path, words: list[str]) -> None:
        variables, words = split_variables(words)
        words = [*words, *([] if "--kv-cache-memory-bytes" in words else ["--kv-cache-memory-bytes", "16M"]), "--port", "0"]  # fmt: skip
        terminal = Program(words, folder, **variables)
        try:
            text = terminal.wait(r"Ready\. Try:\n")
            url = re.findall(r"address +(http://\S+)", text)[-1]
            key = variables.get("QUIRE_API_KEY", "none")
            headers = {"Authorization": f"Bearer {key}"}
            answer = httpx.get(f"{url}/v1/models", headers=headers, timeout=60)
            assert answer.json()["data"][0]["id"] == model
            assert re.search(r"\n *total since process start ", text), "a table without file names"
        finally:
            terminal.type("\x03")
            terminal.close()

    return check


def chats(folder: Path, words: list[str]) -> None:
    """An answer of the whole length, then Ctrl-D."""
    terminal = Program(words, folder)
    terminal.wait(r"Chatting with quire-tiny.*\n> ")
    terminal.type("Tell me a story about a fox.\n")
    story = terminal.wait(r"\n> $").partition("\n")[2]
    assert len(story.split()) > 30, "an answer ends by itself, not after 16 tokens"
    assert "cut at" not in story
    terminal.type("\x04")
    assert terminal.close() == 0


def in_terminal(pattern: str) -> Callable[[Path, list[str]], None]:
    """The command ends by itself in a terminal, and shows the pattern."""

    def check(folder: Path, words: list[str]) -> None:
        terminal = Program(words, folder)
        terminal.wait(pattern)
        assert terminal.close() == 0

    return check


def loads(folder: Path, words: list[str]) -> None:
    """The load generator, against a server on a free port; fewer requests, so that it ends soon."""
    shorter = {"--num-prompts": "8", "--request-rate": "20", "--random-input-len": "32", "--random-output-len": "8"}  # fmt: skip
    words = [shorter.get(words[at - 1], word) if at else word for at, word in enumerate(words)]
    with Served("quire-tiny", "--kv-cache-memory-bytes", "64M") as server:
        text = run(folder, [*words, "--base-url", server.url])
    assert re.search(r"Successful requests: +8\b", text), text


def batch(folder: Path, words: list[str]) -> None:
    body = (
        '{"model": "quire-tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}'
    )
    line = f'{{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {body}}}'
    (folder / "in.jsonl").write_text(line + "\n")
    run(folder, words)
    assert '"status_code": 200' in (folder / "out.jsonl").read_text().replace('":2', '": 2')


def program(folder: Path, words: list[str]) -> None:
    code = "from vllm import LLM, SamplingParams\nprint(LLM('quire-tiny').generate(['Once'], SamplingParams(max_tokens=4))[0].prompt)\n"
    (folder / "your_program.py").write_text(code)
    assert "Once" in run(folder, words)


def configured(folder: Path, words: list[str]) -> None:
    (folder / words[-1]).write_text("model: quire-tiny\nmax_num_seqs: 8\n")
    serves("quire-tiny")(folder, words)


def configured_doctor(folder: Path, words: list[str]) -> None:
    (folder / words[-1]).write_text("model: quire-tiny\nmax_num_seqs: 8\n")
    in_terminal(r"This configuration would start\.")(folder, words)


def kept_blocks(folder: Path, words: list[str]) -> None:
    """A command on a folder of KV blocks, which is empty here."""
    (folder / "kv").mkdir()
    run(folder, [word.replace("/var/lib/quire/kv", str(folder / "kv")) for word in words])


def copies(folder: Path, words: list[str]) -> None:
    """A file of the package; the name of its folder is the output of a command."""
    run(folder, ["sh", "-c", f'cp "{words[1]}" {words[2]}'])
    (copy,) = folder.iterdir()
    assert copy.read_bytes()[:4] in (b"RIFF", b"\x89PNG")


PLACEHOLDERS = {
    "Qwen/Qwen2.5-VL-3B-Instruct": "quire-tiny",
    "Qwen/Qwen3-8B": "quire-tiny",
    "Qwen/Qwen3-30B-A3B": "quire-tiny",
    "qwen3:4b": "quire-tiny",
    "qwen3:0.6b": "quire-tiny",
    "Qwen/Qwen3-0.6B": "quire-tiny",  # there is no hub
    "path/to/a/model": "quire-tiny",
    "MODEL": "quire-tiny",
    "8192": "2048",  # what quire-tiny has
}
DOCKER = "needs Docker or a cluster: tests/deploy reads and runs what these files say"
HOW: dict[str, Callable[[Path, list[str]], None] | str] = {
    "make serve": INSTALLS,
    "make wheel": INSTALLS,
    "make test": INSTALLS,
    "pip install": INSTALLS,
    "docker": DOCKER,
    "kubectl": DOCKER,
    "quire doctor Qwen/Qwen3-0.6B": in_terminal(r"This configuration would start\."),
    "quire doctor qwen3:4b": in_terminal(r"This configuration would start\."),
    "quire doctor --config quire.yaml": configured_doctor,
    "quire kv": kept_blocks,
    "redis-server": "another program: tests/kv_tiers starts it where it is installed",
    "kill": "ends an engine while it answers: tests/processes and tests/engine do that",
    "quire collect-env": prints(r"[Qq]uire"),
    "quire doctor MODEL": in_terminal(r"This configuration would start\."),
    "python examples/batch.py": "runs as it is: tests/docs/test_examples.py",
    "quire doctor MODEL --max-num-seqs 8": in_terminal(r"This configuration would start\."),
    "quire serve Qwen/Qwen2.5-VL-3B-Instruct": serves("quire-tiny"),
    "quire serve Qwen2.5-VL-3B-Instruct-Q4_K_M.gguf": "needs two files: tests/media/test_mmproj.py writes small ones",
    "quire serve Qwen/Qwen2-Audio-7B-Instruct": "there is no small model that hears: tests/media serves a random one",
    "quire serve MODEL --port": "needs a redis and a key file: tests/kv_tiers starts both, with two replicas",
    "quire serve openai/whisper-small": "is large: the pages' requests go to quire-tiny-whisper (test_page_commands.py)",
    "quire serve quire-tiny-whisper": serves("quire-tiny-whisper"),
    "cp": copies,
    "quire serve Qwen/Qwen3-0.6B --max-model-len 8192": serves("quire-tiny"),
    "quire serve path/to/a/model --quantization int8": serves("quire-tiny"),
    "quire serve --config quire.yaml": configured,
    "quire serve --speculative-config": serves("quire-tiny"),
    "quire serve --speculative-config.method suffix": serves("quire-tiny"),
    "quire serve --spec-method draft_model": serves("quire-tiny"),
    "quire serve Qwen/Qwen3-8B": serves("quire-tiny"),
    "quire serve Qwen/Qwen3-30B-A3B": "a mixture on two ranks: tests/parallel runs a tiny one with these flags",
    "quire serve qwen3:0.6b": serves("quire-tiny"),
    "quire serve path/to/a/model": serves("quire-tiny"),
    "quire chat qwen3:0.6b": chats,
    "quire serve MODEL --quantization int8": serves("quire-tiny"),
    "quire serve MODEL --max-num-seqs 8": serves("quire-tiny"),
    "quire serve --config server.yaml": configured,
    "quire serve quire-tiny --enable-lora": serves("quire-tiny"),
    "quire serve quire-tiny-embed": serves("quire-tiny-embed"),
    "quire serve quire-tiny": serves("quire-tiny"),
    "QUIRE_API_KEY=sk-mine quire serve quire-tiny": serves("quire-tiny"),
    "QUIRE_API_KEY=sk-mine quire serve MODEL": serves("quire-tiny"),
    "quire serve --help=cache": prints(r"--enable-prefix-caching"),
    "quire serve --print-config": prints(r"# quire serve --config"),
    "quire serve --help": prints(r"usage: quire serve"),
    "quire serve": serves("quire-tiny"),
    "quire chat Qwen/Qwen3-0.6B": chats,
    "quire chat": chats,
    "quire complete -q": in_terminal(r"\w+ \w+ \w+"),
    "quire run-batch": batch,
    "quire bench throughput quire-tiny": prints(r"Throughput: [\d.]+ requests/s"),
    "quire bench serve": loads,
    "quire bench sweep serve": "starts servers for each setting, at port 8000: tests/bench/test_sweep.py runs it with another",
    "python -m quire.compat your_program.py": program,
    "python -m quire.compat -m lm_eval": "needs lm-eval: make clients runs it",
    "python -m benchmarks": "measures for minutes: tests/bench runs it with small numbers",
    "python -c from vllm": "needs `pip install ./compat/vllm`: tests/config/test_as_vllm.py installs it into a folder and imports it",
    "vllm serve quire-tiny": "needs `pip install ./compat/vllm`: tests/config/test_as_vllm.py installs it into a folder",
}
PAGES = [ROOT / "README.md", ROOT / "compat/vllm/README.md", *sorted((ROOT / "docs").glob("*.md"))]


def written() -> Iterator[Command]:
    """The commands of the pages, each once, without requests."""
    names = {path.name for path in PAGES}
    seen: set[tuple[str, ...]] = set()
    for command in commands():
        if (
            command.page in names
            and command.words[0] != "curl"
            and tuple(command.words) not in seen
        ):
            seen.add(tuple(command.words))
            yield command


def key_of(command: Command) -> str | None:
    """The longest key of HOW with which the command begins."""
    text = " ".join(command.words)
    return max((key for key in HOW if f"{text} ".startswith(f"{key} ")), key=len, default=None)


ALL = list(written())
LONG = ("quire bench", "quire complete", "quire run-batch", "quire chat", "python -m quire.compat your_program.py")  # fmt: skip


def cases() -> Iterator[object]:
    for command in ALL:
        text = " ".join(command.words)
        slow = "serve" in text and "--help" not in text and command.page != "README.md"
        slow = slow or text.startswith(LONG[:3])
        yield pytest.param(command, id=f"{command.page}: {text[:50]}", marks=[pytest.mark.slow] if slow else [])  # fmt: skip


def test_each_command_has_a_line_and_each_line_a_command():
    keys = {key_of(command) for command in ALL}
    assert [command for command in ALL if key_of(command) is None] == []
    assert HOW.keys() - keys == set()
    assert key_of(Command("x.md", ["quire", "teleport"])) is None
    assert len(ALL) > 25


@pytest.mark.sampled(2)
@pytest.mark.parametrize("command", list(cases()))
def test_a_command_runs(command: Command, tmp_path: Path):
    how = HOW[str(key_of(command))]
    if isinstance(how, str):
        assert ":" in how, "a reason names the test that stands in for it"
        return
    how(tmp_path, [PLACEHOLDERS.get(word, word) for word in command.words])
