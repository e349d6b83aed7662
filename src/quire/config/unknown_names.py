"""The error for a name that no table has: suggests the nearest known one, or Quire's flag for one of llama.cpp."""

from __future__ import annotations

import difflib
from typing import Literal

from quire.config.options import options
from quire.config.vllm_flags import OLD, TABLE

Source = Literal["flag", "keyword"]

LLAMA_CPP = {name: remedy for remedy, names in TABLE["llama_cpp"].items() for name in names.split()}
"""Flag of llama.cpp without its dashes, or keyword of llama-cpp-python -> what to use."""


class UnknownName(TypeError):
    """A keyword or flag that no table has; the message suggests what to use."""


def unknown(written: str, source: Source) -> str:
    """The error message for an unknown name."""
    what = "flag" if source == "flag" else "keyword"
    bare = written.lstrip("-")
    if (remedy := LLAMA_CPP.get(bare) or LLAMA_CPP.get(bare.removeprefix("no-"))) is not None:
        shown = written if written.startswith("-") else spelt(bare, source)
        use = "" if remedy.startswith("leave") else "use "
        return f"unknown {what} {shown}, a name of llama.cpp: {use}{remedy}"
    name = bare.replace("-", "_")
    near = difflib.get_close_matches(name.removeprefix("no_"), [*options(), *OLD], n=1, cutoff=0.6)
    hint = f"; did you mean {spelt(near[0], source)}?" if near else ""
    one_dash = source == "flag" and written.startswith("-") and not written.startswith("--")
    return f"unknown {what} {written if one_dash else spelt(name, source)}{hint}"


def spelt(name: str, source: Source) -> str:
    """max_num_seqs -> --max-num-seqs on a command line"""
    return f"--{name.replace('_', '-')}" if source == "flag" else name
