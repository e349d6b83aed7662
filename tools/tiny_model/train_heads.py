"""Trains the heads of quire-tiny, EAGLE-3 and MTP, side by side on the same text, and writes their folders.

    python -m tools.tiny_model.train_heads src/quire/embedded --steps 400

Text: that of quire-tiny's own training, and answers that quire-tiny itself gives to its prompts. What is learnt is quire-tiny's
distribution of each next token. The folders are written every `--save` steps and on SIGTERM, without figures
(`evaluate_heads.py`).
"""

import argparse
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tools.tiny_model import chat, corpus, export
from tools.tiny_model.heads import DRAFT_VOCABULARY, Documents, Eagle3, Head, Mtp, load, pack
from tools.tiny_model.model import Network
from tools.tiny_model.published import language_model
from tools.tiny_model.train import load_weights, shape_of

Text = tuple[list[int], list[int]]  # prompt, answer

LONGEST = 640  # tokens of a document
LONGEST_ANSWER = 200
CHAIN = 4  # proposals of a chain in training
LATER = 0.8  # the weight of a proposal's loss beside the one before it
OWN_EVERY = 3  # one text in so many has an answer of quire-tiny
WARM_UP = 20


def texts(tokenizer: Tokenizer, seed: int) -> Iterator[Text]:
    """Yield documents of the training side of the corpus without end."""
    for sample in corpus.samples(seed, held_out=False):
        prompt, answer = (
            tokenizer.encode(text, add_special_tokens=False).ids
            for text in (chat.prompt_of(sample), chat.answer_of(sample))
        )
        if len(prompt) + len(answer) <= LONGEST and len(answer) > CHAIN:
            yield prompt, answer


@torch.inference_mode()
def answered(folder: Path, prompts: list[list[int]], temperature: float) -> list[Text]:
    """What quire-tiny answers, drawn at a temperature (0: greedy); prompts of like length go together."""
    model = language_model(folder)
    how = {"do_sample": False, "temperature": None}
    if temperature:
        how = {"do_sample": True, "temperature": temperature, "top_k": 0}
    found: list[Text] = []
    ordered = sorted(prompts, key=len)
    for at in range(0, len(ordered), 64):
        part = ordered[at : at + 64]
        longest = len(part[-1])
        tokens_BT = torch.zeros(len(part), longest, dtype=torch.long)
        for row, prompt in enumerate(part):
            tokens_BT[row, longest - len(prompt) :] = torch.tensor(prompt)
        lengths_B = torch.tensor([len(prompt) for prompt in part])
        mask_BT = torch.arange(longest) >= (longest - lengths_B)[:, None]
        out = model.generate(
            input_ids=tokens_BT, attention_mask=mask_BT.long(), max_new_tokens=LONGEST_ANSWER, **how
        )
        for prompt, row in zip(part, out[:, longest:].tolist(), strict=True):
            ends = [
                at for at, token in enumerate(row) if token in export.GENERATION["eos_token_id"]
            ]
            found.append((prompt, row[: ends[0] + 1] if ends else row))
    return found


def batches(tokenizer: Tokenizer, own: list[Text], seed: int, tokens: int) -> Iterator[list[Text]]:
    """Yield documents of like length, at most about `tokens` with their padding."""
    rng, drawn = random.Random(seed), texts(tokenizer, seed)
    while True:
        pool = [next(drawn) for _ in range(256)]
        pool[::OWN_EVERY] = rng.choices(own, k=len(pool[::OWN_EVERY]))
        pool.sort(key=lambda text: len(text[0]) + len(text[1]))
        parts, part = [], []
        for text in pool:
            if (len(part) + 1) * (len(text[0]) + len(text[1])) > tokens:
                parts.append(part)
                part = []
            part.append(text)
        rng.shuffle(parts)  # what is left over, a part of the longest, is not taken
        yield from parts


def loss(head: Head, documents: Documents, shares_BQV: Tensor) -> Tensor:
    """Weighted mean cross entropy of the chains' proposals after quire-tiny's own distribution [B, Q, V of quire-tiny]."""
    wanted_BQV = shares_BQV[..., head.ids_V()]
    mask_BQ = documents.mask_BQ().float()
    total = torch.zeros(())
    for step, logits in enumerate(head.proposals(documents, CHAIN)):
        many = logits.shape[1]
        each = -(wanted_BQV[:, step:] * logits.log_softmax(-1)).sum(-1)
        mean = (each * mask_BQ[:, :many]).sum() / mask_BQ[:, :many].sum().clamp(min=1)
        total = total + LATER**step * mean
    return total


def shares(target: Network, documents: Documents) -> Tensor:
    """Quire-tiny's distribution of the token that each chain proposes first [B, Q, V]."""
    with torch.no_grad():
        return target.logits(documents.final_BTD[:, documents.first : -1]).softmax(-1)


def write(out: Path, head: Head, facts: dict[str, object]) -> None:
    """Write config.json, weights and the card."""
    out.mkdir(parents=True, exist_ok=True)
    export.write_json(out / "config.json", head.config())
    export.write_weights(out / "model.safetensors", head.weights(), {})
    numbers = sum(p.numel() for p in head.parameters())
    card = (export.CARDS / f"{head.folder}.md").read_text()
    facts = {"parameters": f"{numbers / 1e6:.2f} million", **facts, "figures": export.NO_FIGURES}
    for slot, value in facts.items():
        card = card.replace("{{" + slot + "}}", str(value))
    (out / "README.md").write_text(card)


def run(asked: argparse.Namespace) -> None:
    """Train both heads; write them now and then."""
    torch.set_num_threads(asked.threads)
    torch.manual_seed(asked.seed)
    folder = asked.embedded / "quire-tiny"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    target = Network(shape_of(folder)).requires_grad_(False)
    load_weights(target, folder)
    drawn, counts, prompts = texts(tokenizer, asked.seed + 1), Counter(), []
    for _ in range(4000):
        prompt, answer = next(drawn)
        counts.update(answer)
        prompts += [prompt] * bool(prompt)
    common = [token for token, _ in counts.most_common(DRAFT_VOCABULARY)]
    print(f"draft vocabulary: {sum(counts[t] for t in common) / counts.total():.1%} of the answers' tokens")  # fmt: skip
    own = answered(folder, prompts[: asked.own], 0.7)
    print(f"{sum(len(answer) for _, answer in own)} tokens of own answers", flush=True)
    heads: list[Head] = [Eagle3(target, common), Mtp(target)]
    if asked.start:
        heads = [load(asked.start / head.folder, target) for head in heads]
    heads = [head for head in heads if asked.only in (None, head.folder)]
    optimizers = [
        torch.optim.AdamW(head.parameters(), lr=asked.rate, betas=(0.9, 0.98), weight_decay=0.01)
        for head in heads
    ]
    stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stop.append(number))
    began, seen, losses = time.time(), 0, [0.0] * len(heads)
    for step, part in enumerate(batches(tokenizer, own, asked.seed, asked.batch), 1):
        documents = pack(part, target)
        shares_BQV = shares(target, documents)
        seen += sum(len(prompt) + len(answer) for prompt, answer in part)
        for at, (head, optimizer) in enumerate(zip(heads, optimizers, strict=True)):
            for group in optimizer.param_groups:
                left = (asked.steps - step + 1) / asked.steps
                group["lr"] = asked.rate * min(1.0, step / WARM_UP, 1.5 * left)
            optimizer.zero_grad()
            value = loss(head, documents, shares_BQV)
            value.backward()
            torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            optimizer.step()
            losses[at] += float(value.detach()) / 20
        if step % 20 == 0:
            shown = ", ".join(f"{head.folder} {each:.3f}" for head, each in zip(heads, losses, strict=True))  # fmt: skip
            print(f"step {step} tokens {seen / 1e6:.2f}M loss {shown}, {time.time() - began:.0f} s", flush=True)  # fmt: skip
            losses = [0.0] * len(heads)
        if step % asked.save == 0 or step == asked.steps or stop:
            for head in heads:
                write((asked.out or asked.embedded) / head.folder, head, {"steps": step, "tokens": f"{seen / 1e6:.1f} million"})  # fmt: skip
        if step == asked.steps or stop:
            return


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("embedded", type=Path, help="the folder of quire-tiny's folder")
    parser.add_argument("--out", type=Path, help="where the heads' folders are made; unset: there")
    parser.add_argument("--from", dest="start", type=Path, help="the folder of heads to go on from")
    parser.add_argument("--only", choices=(Eagle3.folder, Mtp.folder), help="unset: both")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=4096, help="tokens in a step")
    parser.add_argument("--own", type=int, default=512, help="answers of quire-tiny to learn from")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--save", type=int, default=50)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--threads", type=int, default=1)
    run(parser.parse_args())


if __name__ == "__main__":
    main()
