"""Measures a published folder through Quire, with greedy tokens, on scenes whose combinations of things it was not trained on.

    python -m tools.tiny_vision.evaluate src/quire/embedded/quire-tiny --scenes 500 --write

`--write` puts the figures into the card. An answer is right if every character is.
"""

from __future__ import annotations

import argparse
import datetime
import re
from collections.abc import Sequence
from pathlib import Path

from quire import LLM, SamplingParams
from tools.tiny_vision.accuracy import LONGEST, Accuracy, Case, held_out
from tools.tiny_vision.questions import KINDS

TITLES = {
    "describe": "what is in the picture", "count": "how many shapes, circles, red shapes", "colour": "the colour of a thing",
    "where": "where a thing is", "beside": "what is left or right of a thing", "number": "a number of 1 to 3 digits",
    "json": "the whole picture as JSON",
}  # fmt: skip
FIGURES = re.compile(r"<!-- figures of pictures -->.*?<!-- end of figures of pictures -->", re.S)


def examine(llm: LLM, cases: Sequence[Case]) -> Accuracy:
    """All questions about all pictures."""
    asked = [(case, question) for case in cases for question in case.questions]
    chats = [
        [{"role": "user", "content": [{"type": "image_pil", "image_pil": case.picture}, {"type": "text", "text": question.text}]}]
        for case, question in asked
    ]  # fmt: skip
    sampling = SamplingParams(temperature=0, max_tokens=LONGEST)
    found = Accuracy()
    for (_, question), one in zip(asked, llm.chat(chats, sampling, use_tqdm=False), strict=True):  # type: ignore[arg-type]
        found.add(question, one.outputs[0].text)
    return found


def table(found: Accuracy, scenes: int) -> str:
    lines = ["| question | asked | right |", "|---|---|---|"]
    lines += [f"| {TITLES[kind]} | {found.asked[kind]} | {found.of(kind):.1%} |" for kind in KINDS]
    lines += ["", f"{scenes} scenes; exact match, greedy, bfloat16, in Quire on a CPU, {datetime.date.today()}."]  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)  # fmt: skip
    parser.add_argument("model", type=Path)
    parser.add_argument("--scenes", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--wrong", type=int, default=0, help="number of wrong answers to print")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    with LLM(str(asked.model), kv_cache_memory_bytes="64M", max_num_seqs=16) as llm:
        found = examine(llm, held_out(asked.scenes, asked.seed))
    print(found)
    for question, answer in found.wrong[: asked.wrong]:
        print(f"   {question.text!r}\n   wanted {question.answer!r}\n   got    {answer!r}")
    if asked.write:
        card = asked.model / "README.md"
        filled = f"<!-- figures of pictures -->\n{table(found, asked.scenes)}\n<!-- end of figures of pictures -->"
        card.write_text(FIGURES.sub(lambda _: filled, card.read_text()))


if __name__ == "__main__":
    main()
