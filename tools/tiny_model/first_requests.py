"""Sends quire-tiny what newcomers send first, through Quire, and reports how much of it is answered well.

    python -m tools.tiny_model.first_requests FOLDER [--each 300] [--wrong 5]

| goal | what is asked | right |
|---|---|---|
| schema | held-out sentences with a JSON schema that Quire enforces | the object has the values of the sentence |
| reworded | sentences of requests.json, which no template of the corpus has | the same |
| sums | held-out sums of two numbers below 100 | the number at the end |
| stories | requests for stories, at the model's default temperature | an end, and every word is one of the corpus or the prompt |

Greedy but for stories. The other figures of the card, by task and without Quire, come from `evaluate.py`.
"""

import argparse
import itertools
import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from quire import LLM, SamplingParams, StructuredOutputsParams
from tools.tiny_model import chat, corpus, schemas, stories, words
from tools.tiny_model.sample import Sample, ask

SEED = 3
LONGEST = 300
GOALS = {"schema": 95.0, "sums": 98.0, "stories": 100.0}
REQUESTS = Path(__file__).with_name("requests.json")
Check = Callable[[Sample, str, bool], bool]  # the request, the answer, whether it ended by itself


def held_out(family: str, many: int) -> list[Sample]:
    """Return held-out samples with different prompts."""
    found: dict[str, Sample] = {}
    for sample in corpus.samples(SEED, True, family, plain=True):
        found.setdefault(chat.prompt_of(sample), sample)
        if len(found) == many:
            break
    return list(found.values())


def reworded() -> list[Sample]:
    """Return the requests written by hand."""
    made = []
    for text, expected, *more in json.loads(REQUESTS.read_text()):
        messages = ask(text, *more)
        made.append(Sample("schema", "", text, messages, expected=expected, schema=schemas.schema_of(expected)))  # fmt: skip
    return made


def same_values(sample: Sample, text: str, ended: bool) -> bool:
    """Whether the text is the object that was expected."""
    try:
        return bool(ended and json.loads(text) == sample.expected)
    except ValueError:
        return False


def right_sum(sample: Sample, text: str, ended: bool) -> bool:
    """Whether the last number is the sum."""
    numbers = re.findall(r"\d+", text)
    return ended and bool(numbers) and int(numbers[-1]) == sample.expected


def known_words() -> set[str]:
    """Return the words that stories are made of."""
    rng = random.Random(SEED)
    told = (stories.write(rng, rng.choice([None, *words.HEROES]))[0] for _ in range(20_000))
    listed = [words.NAMES, words.ANIMALS, words.HEROES, words.ITEMS, words.PLACES, words.FOODS, words.VERBS]  # fmt: skip
    return {word for text in told for word in _words(text)} | {
        w for words_ in listed for w in words_
    }


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W\d_]+", text)


def whole_words(known: set[str]) -> Check:
    """Return the check of a story."""

    def check(sample: Sample, text: str, ended: bool) -> bool:
        asked = set(_words(sample.messages[-1]["content"]))
        return ended and set(_words(text)) <= known | asked

    return check


def answers(llm: LLM, samples: list[Sample], temperature: float) -> Iterator[tuple[str, bool]]:
    """Yield (answer, whether it ended by itself) in the order of the samples."""
    params = []
    for number, sample in enumerate(samples):
        form = StructuredOutputsParams(json=sample.schema) if sample.schema else None
        params.append(
            SamplingParams(
                temperature=temperature, max_tokens=LONGEST, seed=number, structured_outputs=form
            )
        )
    prompts = [chat.prompt_of(sample) for sample in samples]
    for output in llm.generate(prompts, params, use_tqdm=False):
        (one,) = output.outputs
        yield one.text.split("</think>")[-1].strip(), one.finish_reason == "stop"


def report(name: str, samples: list[Sample], given: list[tuple[str, bool]], check: Check, wrong: int) -> float:  # fmt: skip
    """Print the share of right answers and some of the others; return the share."""
    bad = [(s, a) for s, a in zip(samples, given, strict=True) if not check(s, *a)]
    share = 100 * (1 - len(bad) / len(samples))
    goal = f"  goal {GOALS[name]:.0f} %" if name in GOALS else ""
    print(
        f"{name:10} {len(samples) - len(bad):4} of {len(samples)} {share:6.1f} %{goal}", flush=True
    )
    for sample, (text, _) in itertools.islice(bad, wrong):
        print(f"   asked  {sample.messages[-1]['content'][-200:]!r}")
        print(f"   wanted {json.dumps(sample.expected)}\n   got    {text!r}")
    return share


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder")
    parser.add_argument("--each", type=int, default=300)
    parser.add_argument("--wrong", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    more: dict[str, Any] = {"max_num_seqs": 32, "kv_cache_memory_bytes": 64 << 20}
    llm = LLM(model=asked.folder, **more)
    tests: list[tuple[str, list[Sample], Check, float]] = [
        ("schema", held_out("schema", asked.each), same_values, 0.0),
        ("reworded", reworded(), same_values, 0.0),
        ("sums", held_out("sums", asked.each), right_sum, 0.0),
        ("stories", held_out("story_chat", asked.each), whole_words(known_words()), 0.3),
    ]
    for name, samples, check, temperature in tests:
        given = list(answers(llm, samples, temperature))
        report(name, samples, given, check, asked.wrong)
    llm.shutdown()


if __name__ == "__main__":
    main()
