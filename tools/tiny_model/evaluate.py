"""Asks a published model what it was never trained on, and writes the figures into its card.

    python -m tools.tiny_model.evaluate FOLDER [--each 200] [--only json tools] [--wrong 3] [--write]
    python -m tools.tiny_model.evaluate FOLDER --adapter FOLDER ...    the figures are those of the adapter
    python -m tools.tiny_model.evaluate FOLDER --draft FOLDER --write  how often the draft proposes what the model says

Runs in Transformers, so that the figures say something about the weights and nothing about Quire. Greedy, in bfloat16.
"""

import argparse
import datetime
import itertools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast

from tools.tiny_model import adapter, chat, corpus, grammar
from tools.tiny_model.published import language_model
from tools.tiny_model.sample import Sample

SEED = 2
BATCH = 50
LONGEST = 260
FIGURES = re.compile(r"<!-- figures -->.*<!-- end of figures -->", re.DOTALL)


@dataclass(frozen=True)
class Exam:
    """One line of the table: which prompts, and which of them count."""

    title: str
    family: str | None
    fits: Callable[[Sample, int], bool]  # the sample and the tokens of its prompt
    held_out: bool = True
    plain: bool = True


def _second_turn(sample: Sample, length: int) -> bool:
    return _turns(sample) == 2 and not sample.tools


def _turns(sample: Sample) -> int:
    return sum(message["role"] == "user" for message in sample.messages)


EXAMS = {
    "json": Exam("JSON object from a sentence", "json", lambda s, n: True),
    "tools": Exam(
        "choose one of up to four functions and fill it",
        "tools",
        lambda s, n: _turns(s) == 1 and bool(s.calls),
    ),
    "tools_none": Exam(
        "say that none of the functions fits", "tools", lambda s, n: _turns(s) == 1 and not s.calls
    ),
    "calls": Exam("two or three calls at once", "calls", lambda s, n: True),
    "offered": Exam(
        "other tasks while functions are offered",
        None,
        lambda s, n: bool(s.tools) and s.family in corpus.TALK and bool(s.key),
        plain=False,
    ),
    "tool_result": Exam("tell what a function returned", "tool_result", lambda s, n: True),
    "schema_tool": Exam("fill a function made from a class", "schema_tool", lambda s, n: True),
    "sums": Exam("sum of two numbers below 100, with thought", "sums", lambda s, n: s.thinking),
    "sums_direct": Exam(
        "the same, thinking turned off: worked out in the answer",
        "sums",
        lambda s, n: not s.thinking,
    ),
    "retrieval": Exam(
        "fact from a text, up to 512 tokens",
        "retrieval",
        lambda s, n: n <= 512 and _turns(s) == 1,
    ),
    "retrieval_long": Exam(
        "fact from a text, 513 to 1,024 tokens",
        "retrieval",
        lambda s, n: 512 < n <= 1024 and _turns(s) == 1,
    ),
    "question": Exam("question about a story", "question", lambda s, n: _turns(s) == 1),
    "repeat": Exam("repeat one to nine words", "repeat", lambda s, n: True),
    "sort": Exam("sort two to six words", "sort", lambda s, n: True),
    "count": Exam("count", "count", lambda s, n: True),
    "fact": Exam("short fact, asked in other words", "fact", lambda s, n: True),
    "sentiment": Exam("positive or negative", "sentiment", lambda s, n: True),
    "unknown": Exam("say that it does not know", "honest", lambda s, n: True),
    "honest": Exam(
        "who are you, hello ... (fixed, seen in training)",
        "honest",
        lambda s, n: not s.key,
        held_out=False,
    ),
    "story": Exam(
        "story on request: of the grammar, about what was asked",
        "story_chat",
        lambda s, n: True,
    ),
    "second": Exam("any of these as a second turn", None, _second_turn, plain=False),
}
DRAFTED = ["json", "tools", "sums", "retrieval", "repeat", "sort", "story"]
ADAPTED = ["json", "tools", "sums", "retrieval", "repeat", "unknown", "honest"]


@dataclass
class Answer:
    """What the model made of a sample; `text` is without the thought, `ended` whether it stopped by itself."""

    sample: Sample
    text: str
    ended: bool

    @property
    def right(self) -> bool:
        """Whether the answer is the one expected: for JSON the same object with keys in the same order."""
        sample, text = self.sample, self.text
        if not self.ended:
            return False
        if sample.family == "json":
            return _same(text, sample.expected)
        if sample.calls:
            found = re.fullmatch(r"<tool_call>\n(.*)\n</tool_call>", text, re.DOTALL)
            made = found[1].split("\n</tool_call>\n<tool_call>\n") if found else []
            return len(made) == len(sample.calls) and all(map(_same, made, sample.calls))
        if sample.family == "story_chat":
            kind = grammar.hero_kind(text)
            free = sample.expected not in sample.messages[-1]["content"]
            return kind is not None and (free or kind == sample.expected)
        return text == sample.answer


def _same(text: str, expected: dict[str, Any]) -> bool:
    try:
        found = json.loads(text)
    except ValueError:
        return False
    return found == expected and list(found) == list(expected)


def prompts(exam: Exam, tokenizer: PreTrainedTokenizerFast, many: int) -> list[Sample]:
    """Return that many samples of different prompts, or all there are."""
    chosen: dict[str, Sample] = {}
    drawn = corpus.samples(SEED, exam.held_out, exam.family, exam.plain)
    for sample in itertools.islice(drawn, 400 * many):
        if len(chosen) == many:
            break
        if not sample.messages:
            continue
        text = chat.prompt_of(sample)
        if text not in chosen and exam.fits(sample, len(tokenizer.encode(text))):
            chosen[text] = sample
    return list(chosen.values())


def answers(
    model: Any, tokenizer: PreTrainedTokenizerFast, samples: list[Sample]
) -> Iterator[Answer]:
    """Yield the greedy answers; prompts of like length go together."""
    ordered = sorted(samples, key=lambda s: len(chat.prompt_of(s)))
    for at in range(0, len(ordered), BATCH):
        part = ordered[at : at + BATCH]
        texts = [chat.prompt_of(sample) for sample in part]
        batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
        with torch.inference_mode():
            out = model.generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                do_sample=False,
                temperature=None,
                max_new_tokens=LONGEST,
            )
        for sample, ids in zip(part, out[:, batch["input_ids"].shape[1] :], strict=True):
            text = tokenizer.decode(ids, skip_special_tokens=True)
            ended = tokenizer.eos_token_id in ids
            yield Answer(sample, text.split("</think>")[-1].strip(), ended)


def table(rows: list[tuple[str, int, int]], day: str, counted: str) -> str:
    """Return the figures as they stand in the card."""
    how = "Exact match" if counted == "prompts" else "Agreement token by token"
    lines = [f"| task | {counted} | right |", "|---|---|---|"]
    lines += [f"| {title} | {many} | {100 * right / many:.1f} % |" for title, many, right in rows]
    lines += ["", f"{how}, greedy, bfloat16, in Transformers on a CPU, {day}."]
    return "<!-- figures -->\n" + "\n".join(lines) + "\n<!-- end of figures -->"


def examine(asked: argparse.Namespace) -> list[tuple[str, int, int]]:
    """Return (title, prompts, right answers) of each exam; prints them and some wrong answers."""
    torch.set_num_threads(asked.threads)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(asked.folder)
    model = language_model(asked.folder, torch.bfloat16)
    names = asked.only or list(EXAMS)
    if asked.adapter:
        adapter.merge(model.state_dict(), load_file(asked.adapter / "adapter_model.safetensors"))
        names = asked.only or ADAPTED
    rows = []
    for name in names:
        samples = prompts(EXAMS[name], tokenizer, asked.each)
        if asked.adapter:
            samples = [adapter.pirate(sample) for sample in samples]
        if not samples:
            continue
        given = list(answers(model, tokenizer, samples))
        right = sum(answer.right for answer in given)
        rows.append((EXAMS[name].title, len(given), right))
        print(
            f"{name:16} {right:4} of {len(given):4} {100 * right / len(given):6.1f} %", flush=True
        )
        for answer in [a for a in given if not a.right][: asked.wrong]:
            asked_for = answer.sample.messages[-1]["content"][-300:]
            expected = chat.answer_of(answer.sample)
            print(f"   {asked_for!r}\n   wanted {expected!r}\n   got    {answer.text!r}")
    return rows


def agreement(asked: argparse.Namespace) -> list[tuple[str, int, int]]:
    """Return (title, tokens, tokens that the draft would have proposed) of the model's greedy answers."""
    torch.set_num_threads(asked.threads)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(asked.folder)
    model, draft = (
        language_model(folder, torch.bfloat16) for folder in (asked.folder, asked.draft)
    )
    rows = []
    for name in asked.only or DRAFTED:
        many = right = 0
        for sample in prompts(EXAMS[name], tokenizer, asked.each):
            prompt = tokenizer(chat.prompt_of(sample), return_tensors="pt")["input_ids"]
            with torch.inference_mode():
                out = model.generate(
                    input_ids=prompt, do_sample=False, temperature=None, max_new_tokens=LONGEST
                )
                proposed = draft(out).logits[:, prompt.shape[1] - 1 : -1].argmax(-1)
            answer = out[:, prompt.shape[1] :]
            many, right = many + answer.numel(), right + int((answer == proposed).sum())
        rows.append((EXAMS[name].title, many, right))
        print(f"{name:16} {right:5} of {many:5} {100 * right / many:6.1f} %", flush=True)
    return rows


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--adapter", type=Path)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--each", type=int, default=200, help="prompts of a task")
    parser.add_argument("--only", nargs="*", choices=list(EXAMS))
    parser.add_argument("--wrong", type=int, default=0, help="wrong answers to print of each task")
    parser.add_argument("--write", action="store_true", help="write the figures into the card")
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    rows = agreement(asked) if asked.draft else examine(asked)
    if asked.write:
        card = (asked.draft or asked.adapter or asked.folder) / "README.md"
        figures = table(rows, asked.date, "tokens" if asked.draft else "prompts")
        card.write_text(FIGURES.sub(lambda found: figures, card.read_text()))


if __name__ == "__main__":
    main()
