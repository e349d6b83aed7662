"""Measures a published folder through Quire, with greedy tokens: voices, speeds, phrases and noises that were not trained on.

    python -m tools.tiny_whisper.evaluate src/quire/embedded/quire-tiny-whisper --phrases DIR --each 300 --write

DIR is of `synthesize.py --held-out`. `--write` puts the figures into the card.
"""

from __future__ import annotations

import argparse
import datetime
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from quire import LLM, SamplingParams
from tools.tiny_whisper import tokenizer as vocabulary
from tools.tiny_whisper.accuracy import LONGEST, Accuracy
from tools.tiny_whisper.espeak import RATE
from tools.tiny_whisper.sentences import KINDS
from tools.tiny_whisper.synthesize import Spoken, read
from tools.tiny_whisper.windows import Windows

PROMPT = "".join((vocabulary.START, vocabulary.ENGLISH, vocabulary.TRANSCRIBE, vocabulary.NO_TIMES))
DIGITS = set(KINDS["digit"])


def heard(llm: LLM, sounds: Sequence[np.ndarray]) -> list[str]:
    """The text of each."""
    prompts = [{"prompt": PROMPT, "multi_modal_data": {"audio": (one, RATE)}} for one in sounds]
    sampling = SamplingParams(temperature=0, max_tokens=LONGEST)
    return [one.outputs[0].text.strip() for one in llm.generate(prompts, sampling, use_tqdm=False)]


def accuracy(llm: LLM, phrases: Sequence[Spoken], sounds: Sequence[np.ndarray]) -> Accuracy:
    found = Accuracy()
    for one, text in zip(phrases, heard(llm, sounds), strict=True):
        found.add(one.text, text)
    return found


def quiet(one: Spoken) -> np.ndarray:
    return (one.samples_N / 32768).astype(np.float32)


def rows(llm: LLM, phrases: Sequence[Spoken], each: int) -> dict[str, Accuracy]:
    """By what is measured."""
    windows = Windows([], vocabulary.train(), 7, held_out=True)

    def noisy(one: Spoken) -> np.ndarray:
        return windows.window([one]).samples_N

    digits = [one for one in phrases if set(one.text.split()) <= DIGITS]
    cases: dict[str, tuple[Sequence[Spoken], Callable[[Spoken], np.ndarray]]] = {
        "phrases, no noise": (phrases, quiet), "phrases, hum and clicks": (phrases, noisy),
        "digits, no noise": (digits, quiet), "digits, hum and clicks": (digits, noisy),
    }  # fmt: skip
    return {
        name: accuracy(llm, some[:each], [how(one) for one in some[:each]])
        for name, (some, how) in cases.items()
    }


def table(found: dict[str, Accuracy]) -> str:
    lines = ["| sound | phrases | words right | whole phrases right |", "|---|---|---|---|"]
    lines += [f"| {name} | {one.texts} | {one.of_words:.1%} of {one.words:,} | {one.of_texts:.1%} |" for name, one in found.items()]  # fmt: skip
    text = (
        "Voices, speeds (146 to 165 words a minute), phrases and noises that were not trained on; greedy, in Quire on a CPU,"
        f" {datetime.date.today()}. A word counts as right by\nthe word error rate: 1 - (replaced + missing + added) / words."
    )
    return "\n".join([*lines, "", text])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)  # fmt: skip
    parser.add_argument("model", type=Path)
    parser.add_argument("--phrases", type=Path, required=True)
    parser.add_argument("--each", type=int, default=300)
    parser.add_argument("--wrong", type=int, default=0, help="number of wrong answers to print")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    with LLM(str(asked.model), kv_cache_memory_bytes="64M", max_num_seqs=16) as llm:
        found = rows(llm, read(asked.phrases), asked.each)
    for name, one in found.items():
        print(f"{name}: {one}")
        for said, text in one.wrong[: asked.wrong]:
            print(f"    {said!r} -> {text!r}")
    if asked.write:
        card = asked.model / "README.md"
        filled = f"<!-- figures -->\n{table(found)}\n<!-- end of figures -->"
        card.write_text(re.sub(r"<!-- figures -->.*?<!-- end of figures -->", lambda _: filled, card.read_text(), flags=re.S))  # fmt: skip


if __name__ == "__main__":
    main()
