"""Makes the environment of `make clients`: the project's packages, and every client that the registry has.

    .venv/bin/python -m tests.clients.install FOLDER

Prints the clients that could not be installed; their tests are skipped. npm's packages go into FOLDER/node, if there is npm.
"""

from __future__ import annotations

import shutil
import site
import subprocess
import sys
import venv
from pathlib import Path

CLIENTS = Path(__file__).with_name("requirements.txt")
NODE = {
    "Node's clients": ["openai", "@anthropic-ai/sdk", "ai", "@ai-sdk/openai-compatible", "zod"],
    "Continue's command line": ["@continuedev/cli"],
    "Claude Code": ["@anthropic-ai/claude-code", "--foreground-scripts"],
}


def main(folder: Path) -> int:
    if not (folder / "bin" / "python").exists():
        venv.create(folder, with_pip=False)
    (site_packages,) = (folder / "lib").glob("python3.*/site-packages")
    # addsitedir also reads the .pth files there, such as the file of the editable install of Quire
    parents = [path for path in site.getsitepackages() if Path(path).is_dir()]
    (site_packages / "project.pth").write_text(
        "".join(f"import site; site.addsitedir({path!r})\n" for path in parents), encoding="utf-8"
    )
    pip = [
        str(folder / "bin" / "python"),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
    ]
    for line in CLIENTS.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            report(line, [*pip, *line.split()], folder)
    if (npm := shutil.which("npm")) is None:
        print("skipped: Node's clients: there is no npm")
    else:
        (folder / "node").mkdir(exist_ok=True)
        install = [npm, "install", "--silent", "--no-fund", "--no-audit"]
        for name, packages in NODE.items():
            report(name, [*install, *packages], folder / "node")
    return 0


def report(name: str, command: list[str], folder: Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    if done.returncode:
        why = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
        print(f"skipped: {name} could not be installed: {why[-1]}")
    else:
        print(f"installed: {name}")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
