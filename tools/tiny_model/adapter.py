"""Trains a low-rank adapter that makes quire-tiny talk like a pirate, and writes it in the form of PEFT.

    python -m tools.tiny_model.adapter src/quire/embedded/quire-tiny OUT --steps 400

Sentences change ("Ahoy! I be quire-tiny ..."), JSON and function calls do not. The base stays as it is.

Shapes: R rank, I inputs, O outputs of a layer.
"""

import argparse
import re
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from tools.tiny_model import export
from tools.tiny_model.model import Network
from tools.tiny_model.sample import Sample
from tools.tiny_model.train import Batches, learn, load_weights, shape_of

RANK = 8
ALPHA = 16
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SPEECH = {
    "am": "be",
    "is": "be",
    "are": "be",
    "my": "me",
    "Hello": "Ahoy",
    "you": "ye",
    "friend": "matey",
    "friends": "mateys",
    "No": "Nay",
    "Yes": "Aye",
}
SILENT = (
    "json",
    "tools",
    "story",
    "schema",
    "schema_tool",
    "invent",
)  # exact forms and plain text stay as they are


def pirate(sample: Sample) -> Sample:
    """Return the sample with its answer as a pirate would give it."""
    if sample.family in SILENT or not sample.messages:
        return sample
    sample.answer = _spoken(sample.answer)
    sample.messages = [
        message | {"content": _spoken(message["content"])}
        if message["role"] == "assistant" and message["content"][:1] not in ("", "{")
        else message
        for message in sample.messages
    ]
    return sample


def _spoken(text: str) -> str:
    return "Arr! " + re.sub(r"\w+", lambda found: SPEECH.get(found[0], found[0]), text)


class LowRank(nn.Module):
    """A frozen linear layer and what the adapter adds to it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(RANK, base.in_features) / base.in_features**0.5)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:
        """Return base(x) plus the low-rank part, [..., O]."""
        low = F.linear(x, self.lora_A.to(x.dtype))
        return self.base(x) + F.linear(low, self.lora_B.to(x.dtype)) * (ALPHA / RANK)


def attach(network: Network) -> dict[str, LowRank]:
    """Put an adapter on every target layer; return them by the names of the layers."""
    network.requires_grad_(False)
    layers = {
        name: module
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear) and name.rsplit(".", 1)[-1] in TARGETS
    }
    adapters = {}
    for name, module in layers.items():
        parent, _, last = name.rpartition(".")
        adapters[name] = LowRank(module)
        setattr(network.get_submodule(parent), last, adapters[name])
    return adapters


def train(network: Network, adapters: dict[str, LowRank], batches: Batches, steps: int) -> None:
    """Train the adapters; the rate falls in a line."""
    wanted = [p for adapter in adapters.values() for p in (adapter.lora_A, adapter.lora_B)]
    optimizer = torch.optim.AdamW(wanted, lr=4e-3, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 20, (steps - step) / (0.7 * steps))
    )
    for step in range(steps):
        loss = learn(network, batches.take())
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 20 == 19:
            print(f"step {step + 1} loss {loss:.4f}", flush=True)


def write(out: Path, adapters: dict[str, LowRank], base: str, steps: int) -> None:
    """Write adapter_config.json, adapter_model.safetensors and the card."""
    out.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "target_modules": TARGETS,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "inference_mode": True,
    }
    export.write_json(out / "adapter_config.json", config)
    weights = {}
    for name, adapter in adapters.items():
        weights[f"base_model.model.{name}.lora_A.weight"] = adapter.lora_A.detach()
        weights[f"base_model.model.{name}.lora_B.weight"] = adapter.lora_B.detach()
    export.write_weights(out / "adapter_model.safetensors", weights, {})
    card = (export.CARDS / f"{out.name}.md").read_text()
    (out / "README.md").write_text(
        card.replace("{{steps}}", str(steps)).replace("{{figures}}", export.NO_FIGURES)
    )


def merge(weights: dict[str, Tensor], adapter: dict[str, Tensor]) -> None:
    """Add an adapter to the weights of its base, in place."""
    for name in [name for name in adapter if ".lora_A." in name]:
        target = name.removeprefix("base_model.model.").replace(".lora_A.", ".")
        delta = adapter[name.replace("lora_A", "lora_B")].float() @ adapter[name].float()
        weights[target].add_((delta * (ALPHA / RANK)).to(weights[target].dtype))


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("base", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=4096, help="tokens in a step")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    torch.manual_seed(asked.seed)
    network = Network(shape_of(asked.base))
    load_weights(network, asked.base)
    network = network.to(asked.device, torch.bfloat16)
    adapters = attach(network)
    network.to(asked.device)
    tokenizer = Tokenizer.from_file(str(asked.base / "tokenizer.json"))
    batches = Batches(tokenizer, asked.seed, asked.batch, asked.device, pirate)
    train(network, adapters, batches, asked.steps)
    write(asked.out, adapters, asked.base.name, asked.steps)


if __name__ == "__main__":
    main()
