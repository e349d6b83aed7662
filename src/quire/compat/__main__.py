"""`python -m quire.compat program.py ARGUMENTS`, or `-m module ARGUMENTS`: run a program written for vLLM.

`python -m quire.compat -m vllm.entrypoints.openai.api_server --model M` starts Quire's server.
"""

from __future__ import annotations

import runpy
import sys

from quire.compat.vllm_shim import install_as_vllm


def main() -> int:
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if words else 2
    install_as_vllm()
    if words[0] != "-m":
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
        return 0
    if len(words) < 2:
        print("python -m quire.compat -m MODULE: the name of a module is missing", file=sys.stderr)
        return 2
    sys.argv = words[1:]
    runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
