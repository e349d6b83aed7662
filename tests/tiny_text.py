"""The language model of quire-tiny as a checkpoint of its own, for tests that need one without a vision tower."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path

from safetensors.torch import load_file, save_file

TINY = Path(__file__).parents[1] / "src" / "quire" / "embedded" / "quire-tiny"
FILES = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
INSIDE = "language_model."


@functools.cache
def tiny_text() -> Path:
    """A folder of this process, deleted at its end."""
    folder = Path(tempfile.mkdtemp(prefix="quire-tiny-text-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    config = json.loads((TINY / "config.json").read_text())["text_config"]
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(TINY / "model.safetensors")
    own = {name.removeprefix(INSIDE): w for name, w in weights.items() if name.startswith(INSIDE)}
    save_file(own, folder / "model.safetensors", metadata={"format": "pt"})
    for name in FILES:
        shutil.copy(TINY / name, folder)
    return folder
