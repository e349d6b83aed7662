"""Embeddings of the markers around pictures and sound, where a wrapper has them in tables beside those of its language model.

Gemma 3n gives the ids from `vocab_offset` of a tower's config on to `embed_vision` and `embed_audio`. They are computed once, when
the language model loads. Knows wrappers of Transformers and their checkpoints. Does not know prompts.

Shape suffixes: N markers, D features of the language model.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from quire.config.engine import ModelSpec
from quire.errors import ConfigError
from quire.models.checkpoint_files import tensors

PARTS = ("embed_vision", "embed_audio")
"""In the order of their ids."""


class MarkedLookup(nn.Module):
    """A lookup table in which the ids from `first` on have rows of their own. `markers_ND`: by id - first."""

    markers_ND: Tensor

    def __init__(self, table: nn.Module, first: int, markers_ND: Tensor):
        super().__init__()
        self.table, self.first = table, first
        self.register_buffer("markers_ND", markers_ND, persistent=False)

    @property
    def weight(self) -> Any:
        return self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        own = ids - self.first
        rows: Tensor = self.table(ids)
        found = self.markers_ND[own.clamp(0, len(self.markers_ND) - 1)]
        return torch.where((own >= 0).unsqueeze(-1), found.to(rows.dtype), rows)


def add_markers(model: PreTrainedModel, wrapper: PreTrainedConfig, spec: ModelSpec) -> None:
    """Give the language model the markers of its wrapper, if this has such tables. Weights of "dummy" have none.

    Raises:
        ConfigError: the checkpoint lacks weights of them.
    """
    if spec.load.load_format == "dummy" or not hasattr(getattr(wrapper, "audio_config", None), "vocab_offset"):  # fmt: skip
        return
    parts = list(_parts(model, wrapper, spec))
    markers_ND = torch.cat([rows_ND for _, rows_ND in parts])
    model.set_input_embeddings(MarkedLookup(model.get_input_embeddings(), parts[0][0], markers_ND))


def _parts(model: PreTrainedModel, wrapper: Any, spec: ModelSpec) -> Iterator[tuple[int, Tensor]]:
    """(first id, rows_ND) of each table."""
    kind: Any = vars(sys.modules[type(model).__module__])["Gemma3nMultimodalEmbedder"]
    stored = {name: tensor for name, tensor in tensors(spec.path, spec.load.load_format) if any(f"{part}." in name for part in PARTS)}  # fmt: skip
    for part in PARTS:
        config = getattr(wrapper, part.replace("embed_", "") + "_config")
        embedder = kind(config, wrapper.text_config)
        own = {name.partition(f"{part}.")[2]: tensor for name, tensor in stored.items() if f"{part}." in name}  # fmt: skip
        try:
            embedder.load_state_dict(own)
        except RuntimeError as error:
            raise ConfigError(f"the checkpoint in {spec.path} does not have {part} as config.json says: {str(error).splitlines()[-1]}") from None  # fmt: skip
        embedder = embedder.to(model.device, model.dtype)
        ids_N = torch.arange(config.vocab_size, device=model.device) + config.vocab_offset
        with torch.inference_mode():
            yield config.vocab_offset, embedder(input_ids=ids_N).clone()
