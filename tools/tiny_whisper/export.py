"""Writes a training run as a folder that Transformers' WhisperForConditionalGeneration and WhisperProcessor load.

    python -m tools.tiny_whisper.export RUN OUT

What goes out is the moving average of the weights, in bfloat16. The same run gives the same bytes. The card has no figures until
`evaluate.py` has written them.
"""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import WhisperFeatureExtractor

from tools.tiny_model.export import NO_FIGURES, write_json, write_weights
from tools.tiny_whisper import tokenizer as vocabulary
from tools.tiny_whisper.network import ALIGNED, TEXT_LENGTH, config
from tools.tiny_whisper.sentences import WORDS
from tools.tiny_whisper.spectrogram import MELS
from tools.tiny_whisper.voices import VARIANTS

CARD = Path(__file__).with_name("card.md")
DROPPED = ("phonemes.",)  # a helper of the training


def generation(tokenizer: Tokenizer) -> dict[str, Any]:
    """generation_config.json. `<|endoftext|>` may come first: a window without speech has no text."""
    id = tokenizer.token_to_id
    end, start = id(vocabulary.END), id(vocabulary.START)
    unwanted = (vocabulary.START, vocabulary.TRANSLATE, vocabulary.TRANSCRIBE, vocabulary.LANGUAGE_MODEL, vocabulary.PREVIOUS, vocabulary.NO_SPEECH)  # fmt: skip
    return {
        "bos_token_id": end, "eos_token_id": end, "pad_token_id": end, "decoder_start_token_id": start,
        "prev_sot_token_id": id(vocabulary.PREVIOUS), "no_timestamps_token_id": id(vocabulary.NO_TIMES),
        "is_multilingual": True, "lang_to_id": {vocabulary.ENGLISH: id(vocabulary.ENGLISH)},
        "task_to_id": {"transcribe": id(vocabulary.TRANSCRIBE), "translate": id(vocabulary.TRANSLATE)},
        "suppress_tokens": [id(name) for name in unwanted], "begin_suppress_tokens": [id("Ġ")],
        "max_length": TEXT_LENGTH, "return_timestamps": False, "alignment_heads": [list(ALIGNED)],
    }  # fmt: skip


def card(state: dict[str, Any]) -> str:
    """The model card with the facts of the run, and without figures."""
    kept = {name: w for name, w in state["optimizer"]["average"].items() if not name.startswith(DROPPED)}  # fmt: skip
    facts = {
        "parameters": f"{sum(w.numel() for w in kept.values()) / 1e6:.2f} million",
        "encoder_layers": state["shape"]["encoder_layers"], "decoder_layers": state["shape"]["decoder_layers"],
        "width": state["shape"]["d_model"], "words": len(WORDS), "vocabulary": textwrap.fill(", ".join(WORDS), 130), "voices": len(VARIANTS),
        "windows": f"{state['windows']:,}", "steps": f"{state['optimizer']['steps']:,}", "figures": NO_FIGURES,
    }  # fmt: skip
    text = CARD.read_text()
    for slot, value in facts.items():
        text = text.replace("{{" + slot + "}}", str(value))
    return text


def export(run: Path, out: Path) -> None:
    """Write the published folder of a run."""
    state = torch.load(run / "state.pt", weights_only=True)
    tokenizer = vocabulary.train()
    vocabulary.write(tokenizer, out)
    values = config(tokenizer, state["shape"]).to_diff_dict()
    values.pop("transformers_version", None)
    write_json(out / "config.json", {"architectures": ["WhisperForConditionalGeneration"], "dtype": "bfloat16", **values})  # fmt: skip
    write_json(out / "generation_config.json", generation(tokenizer))
    WhisperFeatureExtractor(feature_size=MELS, chunk_length=vocabulary.SECONDS).save_pretrained(out)
    weights = {
        name.removeprefix("whisper."): w
        for name, w in state["optimizer"]["average"].items()
        if not name.startswith(DROPPED)
    }
    write_weights(out / "model.safetensors", weights, {})
    (out / "README.md").write_text(card(state))
    size = sum(file.stat().st_size for file in out.iterdir())
    print(f"{out}: {size / 1e6:.2f} MB after {state['windows']} windows")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)  # fmt: skip
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    asked = parser.parse_args()
    export(asked.run, asked.out)


if __name__ == "__main__":
    main()
