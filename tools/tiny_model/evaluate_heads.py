"""Counts how many of a head's proposals quire-tiny says itself, by task, and writes the figures into the head's card.

    python -m tools.tiny_model.evaluate_heads src/quire/embedded --each 40 --write

Plain PyTorch, float32 with the published weights, greedy, on prompts that were never trained on. A chain of proposals begins
after each token of each answer.
"""

import argparse
import datetime
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from tools.tiny_model import chat
from tools.tiny_model.evaluate import DRAFTED, EXAMS, FIGURES, prompts
from tools.tiny_model.heads import Documents, Eagle3, Head, Mtp, load, pack
from tools.tiny_model.model import Network
from tools.tiny_model.train import load_weights, shape_of
from tools.tiny_model.train_heads import answered

PLACES = 3  # proposals of a chain
TOGETHER = 8


@dataclass
class Counts:
    """Of the chains of a task: how many proposed a token at each place, and in how many all were right up to it."""

    begun: list[int] = field(default_factory=lambda: [0] * PLACES)
    right: list[int] = field(default_factory=lambda: [0] * PLACES)

    @property
    def shares(self) -> list[float]:
        """The acceptance at each place, as `vllm:spec_decode_num_accepted_tokens_per_pos` of `num_drafts`."""
        return [right / max(begun, 1) for right, begun in zip(self.right, self.begun, strict=True)]

    @torch.inference_mode()
    def add(self, head: Head, documents: Documents) -> None:
        """Count the chains of some answers."""
        mask_BQ, ids_V = documents.mask_BQ(), head.ids_V()
        alive_BQ = mask_BQ
        for step, logits in enumerate(head.proposals(documents, PLACES)):
            many = logits.shape[1]
            said_BQ = documents.tokens_BT[:, documents.first + 1 + step :][:, :many]
            alive_BQ = alive_BQ[:, :many] & (ids_V[logits.argmax(-1)] == said_BQ)
            self.begun[step] += int(mask_BQ[:, :many].sum())
            self.right[step] += int(alive_BQ.sum())


def table(rows: dict[str, Counts], day: str) -> str:
    """Return the figures as they stand in the card."""
    lines = ["| task | chains | first right | first two | all three | tokens a step |", "|---|---|---|---|---|---|"]  # fmt: skip
    for title, counts in rows.items():
        parts = " | ".join(f"{100 * share:.1f} %" for share in counts.shares)
        lines.append(f"| {title} | {counts.begun[0]} | {parts} | {1 + sum(counts.shares):.2f} |")
    lines += ["", f"Greedy answers of quire-tiny, a chain after each token, float32, in PyTorch on a CPU, {day}."]  # fmt: skip
    return "<!-- figures -->\n" + "\n".join(lines) + "\n<!-- end of figures -->"


def measure(asked: argparse.Namespace) -> None:
    """Print the figures of both heads, and write them."""
    torch.set_num_threads(asked.threads)
    folder = asked.embedded / "quire-tiny"
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    target = Network(shape_of(folder)).requires_grad_(False)
    load_weights(target, folder)
    heads = [load(asked.heads / name, target) for name in (Eagle3.folder, Mtp.folder)]
    found: dict[str, dict[str, Counts]] = {head.folder: {} for head in heads}
    for name in asked.only or DRAFTED:
        samples = prompts(EXAMS[name], tokenizer, asked.each)
        given = [tokenizer.encode(chat.prompt_of(s), add_special_tokens=False) for s in samples]
        texts = answered(folder, given, temperature=0.0)
        counts = [found[head.folder].setdefault(EXAMS[name].title, Counts()) for head in heads]
        for at in range(0, len(texts), TOGETHER):
            documents = pack(texts[at : at + TOGETHER], target)
            for head, one in zip(heads, counts, strict=True):
                one.add(head, documents)
        shown = ", ".join(f"{head.folder} {[round(s, 3) for s in one.shares]}" for head, one in zip(heads, counts, strict=True))  # fmt: skip
        print(f"{name:10} {shown}", flush=True)
    for head in heads:
        figures = table(found[head.folder], asked.date)
        print(f"{head.folder}\n{figures}")
        if asked.write:
            card = asked.heads / head.folder / "README.md"
            card.write_text(FIGURES.sub(lambda _, text=figures: text, card.read_text()))


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("embedded", type=Path, help="the folder of quire-tiny's folder")
    parser.add_argument("--heads", type=Path, help="the folder of the heads' folders; unset: there")
    parser.add_argument("--each", type=int, default=40, help="prompts of a task")
    parser.add_argument("--only", nargs="*", choices=list(EXAMS))
    parser.add_argument("--write", action="store_true", help="write the figures into the cards")
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    asked.heads = asked.heads or asked.embedded
    measure(asked)


if __name__ == "__main__":
    main()
