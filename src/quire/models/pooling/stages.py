"""The heads of pooling models as stages, from the notation of `families.toml`.

    dense:Tanh norm:LayerNorm score|classifier    names of layers in the checkpoint, each with what follows it
    @sparse_linear.pt                             a layer that has a file of its own

Knows names and sizes. Does not know weights (`head.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from quire.config.pooling import Splade, Stage
from quire.errors import Unsupported
from quire.models.json_files import read_json


def head_stages(
    text: str, hf: Mapping[str, Any], hidden: int, num_out: int, eps: float = 1e-5
) -> list[Stage]:
    """The stages of a head; the last one has `num_out` outputs."""
    parts, stages = text.split(), []
    for index, part in enumerate(parts):
        names, _, after = part.partition(":")
        norm, file = after == "LayerNorm", names.startswith("@")
        stages.append(
            Stage(
                kind="layer_norm" if norm else "dense",
                names=[""] if file else names.split("|"),
                folder=names[1:] if file else "",
                num_in=hidden,
                num_out=num_out if index == len(parts) - 1 else hidden,
                activation="" if norm else after,
                eps=float(hf.get("norm_eps") or hf.get("layer_norm_eps") or eps),
            )
        )
    return stages


def with_logits(
    splade: Splade, architecture: str, hf: Mapping[str, Any], family: Mapping[str, Any], hidden: int
) -> Splade:
    """Set the stages from hidden states to the logits of the masked language model.

    Raises:
        Unsupported: the family has no such head here, or has another activation.
    """
    keys = ("hidden_act", "hidden_activation", "activation", "classifier_activation")
    activations = {hf[key] for key in keys if hf.get(key)} - {"gelu"}
    if (text := family.get("logits")) is None or activations:
        raise Unsupported(
            f"SPLADE with {architecture} {' '.join(sorted(map(str, activations)))}",
            "serve a BERT, DistilBERT, RoBERTa, MPNet or ModernBERT with gelu",
        )
    *first, last = head_stages(
        text, hf, hidden, int(hf.get("vocab_size") or 0), family.get("eps", 1e-5)
    )
    return replace(splade, stages=[*first, replace(last, is_tied=True)])


def token_vectors(path: str, hf: Mapping[str, Any], hidden: int, name: str) -> Stage:
    """The projection of each token of ColBERT's own checkpoints (github.com/stanford-futuredata/ColBERT), and of BGE-M3."""
    about = read_json(Path(path) / "artifact.metadata")
    own = about.get("dim") if isinstance(about, dict) else None
    width = int(hf.get("colbert_dim") or own or (hidden if name.startswith("@") else 128))
    return head_stages(name, hf, hidden, width)[0]


def without_normalize(stages: Sequence[Stage]) -> tuple[list[Stage], bool]:
    """The stages before a last Normalize, which a request may leave out (`use_activation`), and whether there is one."""
    normalizes = bool(stages) and stages[-1].kind == "normalize"
    return list(stages[:-1] if normalizes else stages), normalizes
