"""Writes a training run as a folder that any Qwen3 runtime can load.

    python -m tools.tiny_model.export RUN --tokenizer DIR OUT

What goes out is the moving average of the weights, in bfloat16. The same run gives the same bytes. The card has no
figures until `evaluate.py` has written them.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tools.tiny_model import chat
from tools.tiny_model.model import Shape

CARDS = Path(__file__).with_name("cards")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
GENERATION = {
    "bos_token_id": None,
    "eos_token_id": [2, 0],  # the end of a turn, and the end of a story that is plain text
    "pad_token_id": 0,
    "do_sample": True,
    "temperature": 0.3,  # exact answers stay exact, stories differ
}
NO_FIGURES = "<!-- figures -->\nNot measured yet.\n<!-- end of figures -->"


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write one object as indented JSON."""
    path.write_text(json.dumps(value, indent=2) + "\n")


def write_weights(path: Path, weights: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write tensors in the order of their names, so that equal weights are equal files; numbers with a point as bfloat16."""
    ready = {
        name: (w.bfloat16() if w.is_floating_point() else w).contiguous()
        for name, w in sorted(weights.items())
    }
    save_file(ready, path, metadata={"format": "pt", **metadata})
    path.chmod(0o644)  # it is written for its owner only


def card(name: str, state: dict[str, Any]) -> str:
    """Return the model card of the folder `name` with the facts of the run, and without figures."""
    numbers = sum(w.numel() for w in state["optimizer"]["average"].values())
    shape = state["shape"]
    facts = {
        "parameters": f"{numbers / 1e6:.2f} million",
        "layers": shape["num_hidden_layers"],
        "hidden": shape["hidden_size"],
        "vocabulary": shape["vocab_size"],
        "tokens": f"{state['tokens'] / 1e6:.1f} million",
        "steps": state["optimizer"]["steps"],
        "figures": NO_FIGURES,
    }
    text = (CARDS / f"{name}.md").read_text()
    for slot, value in facts.items():
        text = text.replace("{{" + slot + "}}", str(value))
    return text


def export(run: Path, tokenizer: Path, out: Path) -> None:
    """Write the published folder of a run."""
    state = torch.load(run / "state.pt", weights_only=True)
    out.mkdir(parents=True, exist_ok=True)
    for file in TOKENIZER_FILES:
        shutil.copyfile(tokenizer / file, out / file)
    shutil.copyfile(chat.TEMPLATE, out / chat.TEMPLATE.name)
    write_json(out / "config.json", Shape(**state["shape"]).hf_config())
    write_json(out / "generation_config.json", GENERATION)
    write_weights(out / "model.safetensors", state["optimizer"]["average"], {})
    (out / "README.md").write_text(card(out.name, state))
    size = sum(file.stat().st_size for file in out.iterdir())
    print(f"{out}: {size / 1e6:.2f} MB after {state['tokens'] / 1e6:.1f} million tokens")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("out", type=Path)
    asked = parser.parse_args()
    export(asked.run, asked.tokenizer, asked.out)


if __name__ == "__main__":
    main()
