"""Recorded attention: where in the sound the decoder looked when it drew each token. Times of words are made of it.

Some heads of the decoder follow the sound; generation_config.json lists them (`alignment_heads`), else they are all heads of
the upper half of the layers, as in openai/whisper. Only rows that ask for it are recorded.

Shape suffixes: T tokens of this step, S encoder states, H heads, A recorded heads, D features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.forward_context import current_batch

Record = tuple[str, int, bytes]
"""(request, index of the drawn token in it, float32 [A, S])."""


class Recorded(NamedTuple):
    """A request that is recorded. `states`: those of its sound, without padding."""

    id: str
    states: int


def heads_by_layer(
    generation: Mapping[str, Any], num_layers: int, num_heads: int
) -> dict[int, list[int]]:
    """The heads to record. Pairs of the file that the model does not have are left out."""
    pairs = generation.get("alignment_heads")
    if not isinstance(pairs, Sequence) or not pairs:
        pairs = [(layer, h) for layer in range(num_layers // 2, num_layers) for h in range(num_heads)]  # fmt: skip
    found: dict[int, list[int]] = {}
    for layer, head in pairs:
        if 0 <= layer < num_layers and 0 <= head < num_heads:
            found.setdefault(int(layer), []).append(int(head))
    return found


@dataclass(slots=True)
class AttentionRecorder:
    """Of all layers. `wanted`: by row."""

    wanted: dict[int, Recorded] = field(default_factory=dict)
    _new: dict[tuple[str, int], list[Tensor]] = field(default_factory=dict)

    def add(self, row: int, position: int, weights_AS: Tensor) -> None:
        self._new.setdefault((self.wanted[row].id, position), []).append(weights_AS)

    def taken(self) -> list[Record]:
        """What was recorded since the last call."""
        new, self._new = self._new, {}
        return [
            (id, position, torch.cat(parts).cpu().numpy().tobytes())
            for (id, position), parts in new.items()
        ]


class LayerRecorder:
    """Of one layer, whose attention calls it with its queries, and the keys of rows that enter."""

    def __init__(self, recorder: AttentionRecorder, heads: Sequence[int], scale: float):
        self.recorder, self.heads, self.scale = recorder, list(heads), scale
        self.keys: dict[int, Tensor] = {}  # keys_ASD by row

    def record(self, q_THD: Tensor, k_SHD: Tensor | None) -> None:
        batch, wanted = current_batch(), self.recorder.wanted
        if not wanted or batch.encoder is None:
            return
        rows = batch.rows_B.tolist()
        start = 0
        for index in batch.encoder.new_rows if k_SHD is not None else ():
            end = start + batch.encoder.lengths[index]
            if rows[index] in wanted and k_SHD is not None:
                self.keys[rows[index]] = k_SHD[start:end, self.heads].transpose(0, 1).clone()
            start = end
        places = batch.sample_at_S.tolist()
        for place, row, position in zip(places, batch.rows_S.tolist(), batch.lengths_S.tolist(), strict=True):  # fmt: skip
            if row in wanted and row in self.keys:
                q_AD = q_THD[place, self.heads]
                scores_AS = torch.einsum("ad,asd->as", q_AD.float(), self.keys[row].float())
                weights_AS = (scores_AS * self.scale).softmax(-1)[:, : wanted[row].states]
                self.recorder.add(row, position, weights_AS)

    def forget(self, row: int) -> None:
        self.keys.pop(row, None)
