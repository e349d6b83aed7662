"""Trains quire-tiny-embed: an encoder whose vectors find a story that is told again in other words.

    python -m tools.tiny_model.embedder src/quire/embedded/quire-tiny-embed

Contrastive: of all second tellings in a batch, each first telling must find its own, and the other way round (InfoNCE with
negatives from the batch). The folder has the files of sentence-transformers: mean over the tokens, then length 1.

Shapes: N texts, T tokens of the longest, D numbers of a vector.
"""

import argparse
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from transformers import BertConfig, BertModel

from tools.tiny_model import export
from tools.tiny_model.paraphrases import pairs

TEMPERATURE = 0.05
HELD_OUT = 200
SHAPE = dict(
    hidden_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=256,
    max_position_embeddings=512,
    type_vocab_size=1,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    pad_token_id=0,
)
ST = "sentence_transformers.models."
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": ST + "Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": ST + "Pooling"},
    {"idx": 2, "name": "2", "path": "2_Normalize", "type": ST + "Normalize"},
]


def network(vocab_size: int) -> BertModel:
    """Return an untrained encoder; a position says nothing until it is trained."""
    model = BertModel(BertConfig(vocab_size=vocab_size, **SHAPE), add_pooling_layer=False)
    torch.nn.init.zeros_(model.embeddings.position_embeddings.weight)
    torch.nn.init.zeros_(model.embeddings.token_type_embeddings.weight)
    return model


def vectors(model: BertModel, tokenizer: Tokenizer, texts: list[str]) -> Tensor:
    """Return the mean vectors of the texts, of length 1, [N, D]; needs a tokenizer that pads."""
    encodings = tokenizer.encode_batch(texts)
    tokens_NT = torch.tensor([one.ids for one in encodings])
    mask_NT = torch.tensor([one.attention_mask for one in encodings])
    hidden_NTD = model(tokens_NT, attention_mask=mask_NT).last_hidden_state
    weights_NT1 = mask_NT[:, :, None].to(hidden_NTD.dtype)
    return F.normalize((hidden_NTD * weights_NT1).sum(1) / weights_NT1.sum(1), dim=-1)


def top_1(first_ND: Tensor, second_ND: Tensor) -> float:
    """Return the share of first vectors whose nearest second vector is their own."""
    nearest_N = (first_ND @ second_ND.T).argmax(1)
    return float((nearest_N == torch.arange(len(nearest_N))).float().mean())


@torch.no_grad()
def measure(model: BertModel, tokenizer: Tokenizer, told: list[tuple[str, str]]) -> float:
    """Return the top-1 of the pairs in float32."""
    first, second = (vectors(model, tokenizer, list(texts)) for texts in zip(*told, strict=True))
    return top_1(first, second)


def train(
    model: BertModel, tokenizer: Tokenizer, asked: argparse.Namespace, save: Callable[[int], None]
) -> int:
    """Take the steps; stop when the watched pairs, drawn beside the training ones, are found; return the steps taken."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=asked.rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 20, (asked.steps - step) / asked.steps * 2)
    )
    watched, began = pairs(asked.seed, HELD_OUT, published=False), time.time()
    for step in range(1, asked.steps + 1):
        told = pairs(asked.seed * 1_000_003 + step, asked.batch, published=False)
        both_ND = vectors(model, tokenizer, [text for one in told for text in one])
        scores_NN = both_ND[::2] @ both_ND[1::2].T / TEMPERATURE
        own_N = torch.arange(len(told))
        loss = F.cross_entropy(scores_NN, own_N) + F.cross_entropy(scores_NN.T, own_N)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 20 == 0 or step == asked.steps:
            found = measure(model, tokenizer, watched)
            spent = time.time() - began
            print(f"step {step} loss {float(loss.detach()) / 2:.4f} top-1 {found:.3f} {spent:.0f} s", flush=True)  # fmt: skip
            save(step)
            if found >= asked.enough:
                return step
    return asked.steps


def write(out: Path, base: Path, model: BertModel, facts: dict[str, Any]) -> None:
    """Write the folder: weights in bfloat16, the tokenizer of `base`, the files of sentence-transformers, the card."""
    (out / "1_Pooling").mkdir(parents=True, exist_ok=True)
    for file in export.TOKENIZER_FILES:
        shutil.copyfile(base / file, out / file)
    config = model.config.to_diff_dict()
    config |= {"architectures": ["BertModel"], "dtype": "bfloat16"}
    export.write_json(out / "config.json", config)
    export.write_json(out / "modules.json", MODULES)  # type: ignore[arg-type]
    export.write_json(out / "sentence_bert_config.json", {"max_seq_length": 512, "do_lower_case": False})  # fmt: skip
    export.write_json(out / "config_sentence_transformers.json", {"similarity_fn_name": "cosine"})
    pooling = {"word_embedding_dimension": SHAPE["hidden_size"], "pooling_mode_mean_tokens": True}
    export.write_json(out / "1_Pooling" / "config.json", pooling)
    weights = {name: w.detach() for name, w in model.state_dict().items()}
    export.write_weights(out / "model.safetensors", weights, {})
    card = (export.CARDS / f"{out.name}.md").read_text()
    for slot, value in facts.items():
        card = card.replace("{{" + slot + "}}", str(value))
    (out / "README.md").write_text(card)


def run(asked: argparse.Namespace) -> None:
    """Train; write and measure the folder now and then."""
    torch.set_num_threads(asked.threads)
    torch.manual_seed(asked.seed)
    tokenizer = Tokenizer.from_file(str(asked.base / "tokenizer.json"))
    tokenizer.enable_padding()
    model = network(tokenizer.get_vocab_size())
    numbers = sum(p.numel() for p in model.parameters())
    told = pairs(1, HELD_OUT, published=True)

    def save(step: int) -> None:
        rounded = network(tokenizer.get_vocab_size())
        rounded.load_state_dict({n: w.bfloat16().float() for n, w in model.state_dict().items()})
        facts = dict(steps=step, batch=asked.batch, parameters=f"{numbers / 1e6:.2f} million")
        facts["top_1"] = f"{measure(rounded, tokenizer, told):.1%}"
        write(asked.out, asked.base, model, facts)

    train(model, tokenizer, asked, save)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--base", type=Path, default=Path("src/quire/embedded/quire-tiny"))
    parser.add_argument("--steps", type=int, default=400, help="at most")
    parser.add_argument("--batch", type=int, default=128, help="pairs in a step")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--enough", type=float, default=0.99, help="top-1 at which to stop")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    run(parser.parse_args())


if __name__ == "__main__":
    main()
