"""Writes directories by sentence-transformers, and its vectors and scores of some texts beside them, as numpy files.

A program of its own: importing sentence-transformers takes seconds and leaves sockets open, so one run serves all tests.

    python sentence_directories.py BASE CLASSIFIER MASKED FOLDER    # texts on the standard input, as JSON
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
CASES: dict[str, tuple[Any, tuple[str, ...]]] = {
    **{mode: (mode, ()) for mode in MODES},
    "projected": ("mean", ("dense", "normalize")),
    "unit": ("lasttoken", ("normalize",)),
    "joined": (("cls", "mean", "max"), ("dense", "residual", "normalize")),
    "last_dense": ("weightedmean", ("layer_norm", "normalize", "dense")),
}
"""Name -> pooling modes, and the modules after them."""


def main(base: str, classifier: str, masked: str, into: str) -> None:
    import numpy as np
    import sentence_transformers
    import torch
    from sentence_transformers.sentence_transformer import modules
    from sentence_transformers.sparse_encoder import modules as sparse_modules

    texts: list[str] = json.load(sys.stdin)

    def module(name: str, width: int) -> tuple[Any, int]:
        torch.manual_seed(width)
        if name == "dense":
            return modules.Dense(width, 32), 32
        if name == "residual":
            act = torch.nn.GELU()
            return modules.Dense(width, 16, bias=False, activation_function=act, use_residual=True), 16  # fmt: skip
        if name == "layer_norm":
            norm = modules.LayerNorm(width)
            norm.norm.weight.data.normal_(1.0, 0.3)
            return norm, width
        return modules.Normalize(), width

    for name, (mode, names) in CASES.items():
        width = 64 if isinstance(mode, str) else 64 * len(mode)
        parts = [modules.Transformer(base, max_seq_length=60), modules.Pooling(64, pooling_mode=mode)]  # fmt: skip
        for each in names:
            one, width = module(each, width)
            parts.append(one)
        made = sentence_transformers.SentenceTransformer(
            modules=parts, prompts={"query": "w5 w6"}, device="cpu"
        )
        made.save_pretrained(str(Path(into) / name))
        np.save(Path(into) / f"{name}.npy", made.encode(texts, prompt=""))
    parts = [
        modules.Transformer(masked, transformer_task="fill-mask", max_seq_length=60),
        sparse_modules.SpladePooling("max"),
    ]
    sparse = sentence_transformers.SparseEncoder(modules=parts, device="cpu")
    sparse.save_pretrained(str(Path(into) / "sparse"))
    weights = sparse.encode(texts, convert_to_sparse_tensor=False, convert_to_tensor=True)
    np.save(Path(into) / "sparse.npy", weights.numpy())
    cross = sentence_transformers.CrossEncoder(classifier, device="cpu")
    cross.save_pretrained(str(Path(into) / "cross"))
    pairs = list(zip(texts, reversed(texts), strict=True))
    np.save(Path(into) / "cross.npy", cross.predict(pairs, batch_size=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
