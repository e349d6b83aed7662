"""SoundHook: gives the decoder the encoder's states of the windows whose rows enter with a step.

A window is encoded alone, so that its states do not depend on others, and its states are kept: another attempt at the window, or
a preempted request, needs no encoder. Does not know the encoder's inside.

Shape suffixes: S encoder states, M mel bins, F frames, D features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor, nn

from quire.features.media.encoder_cache import EncoderCache
from quire.features.media.gate import EncoderCounts
from quire.features.transcription.alignment import (
    AttentionRecorder,
    LayerRecorder,
    Recorded,
    heads_by_layer,
)
from quire.features.transcription.gate import TranscriptionReport
from quire.forward_context import ForwardBatch, adapter_context
from quire.protocol.plan import EnteredRow, StepPlan
from quire.protocol.sound import decode_rules, decode_spectrogram
from quire.protocol.tensor_data import TensorData
from quire.worker.hooks import Hook

if TYPE_CHECKING:
    from quire.models.base import LanguageModel
    from quire.worker.request_rows import RequestRows


class SoundHook(Hook):
    """`generation`: generation_config.json. `is_part`: this rank has some heads or layers, so it records no attention."""

    name = "transcription"
    order = 20

    def __init__(
        self, rows: RequestRows, most_states: int, generation: Mapping[str, Any], is_part: bool
    ):
        self.rows, self.generation, self.is_part = rows, generation, is_part
        self.recorder = AttentionRecorder()
        self.layers: list[LayerRecorder] = []
        self.encoder: Any = None
        self.cache = EncoderCache(most_states)
        self.of_row: dict[int, EnteredRow] = {}
        self._language: LanguageModel | None = None
        self._counts = EncoderCounts(0, 0, 0)

    def use_models(self, models: Sequence[LanguageModel]) -> None:
        model: Any = models[0]
        is_there = isinstance(model, nn.Module)
        self._language, self.encoder = (model, model.encoder) if is_there else (None, None)
        self.cache.clear()
        self.layers = []
        if isinstance(model, nn.Module) and not self.is_part:
            self._record(model)

    def _record(self, model: Any) -> None:
        cfg = model.cfg
        heads = heads_by_layer(self.generation, cfg.num_hidden_layers, cfg.num_attention_heads)
        for number, own in heads.items():
            attention = model.model.layers[number].encoder_attn
            recorder = LayerRecorder(self.recorder, own, attention.attn.spec.scale)
            attention.recorder = recorder
            self.layers.append(recorder)

    def clear_cache(self) -> bool:
        self.cache.clear()
        return True

    def enter(self, new: EnteredRow) -> None:
        self.of_row[new.row] = new
        data = new.extras.get(self.name)
        if data is not None and self.layers:
            with suppress(msgspec.MsgspecError):  # the processor refuses such rules
                if states := decode_rules(data).aligned:
                    self.recorder.wanted[new.row] = Recorded(new.id, states)

    def leave(self, row: int) -> None:
        self.of_row.pop(row, None)
        self.recorder.wanted.pop(row, None)
        for layer in self.layers:
            layer.forget(row)

    def before(self, plan: StepPlan, batch: ForwardBatch | None) -> None:
        if batch is None or batch.encoder is None or not batch.encoder.new_rows:
            return
        encoder, device = batch.encoder, batch.token_ids_T.device
        states = [
            self._states_of(plan.work[index].row, encoder.lengths[index], device)
            for index in encoder.new_rows
        ]
        encoder.states_SD = states[0] if len(states) == 1 else torch.cat(states)

    def report(self) -> bytes | None:
        counts, records = self._counts, self.recorder.taken()
        if not counts.lookups and not records:
            return None
        self._counts = EncoderCounts(0, 0, 0)
        return msgspec.msgpack.encode(TranscriptionReport(counts, records))

    def _states_of(self, row: int, length: int, device: torch.device) -> Tensor:
        """Those of a row; of one whose sound cannot be encoded, which then fails alone: zeros."""
        new, encode = self.of_row[row], self.encoder
        item = new.media[0]
        key = item.hash if new.adapter is None else f"{new.adapter} {item.hash}"
        self._counts.lookups += 1
        if (states_SD := self.cache.get(key)) is not None:
            self._counts.hits += 1
            return states_SD
        if encode is None:
            raise RuntimeError("the worker is asleep")
        try:
            with adapter_context(self._adapter_of(row)):
                found_SD: Tensor = encode(as_tensor(decode_spectrogram(item.data).mel, device))
        except (ValueError, msgspec.MsgspecError) as error:
            self.rows.faults[row] = f"the encoder cannot read the sound ({type(error).__name__})"
            zeros_SD: Tensor = encode.conv2.weight.new_zeros(length, len(encode.conv2.weight))
            return zeros_SD
        self._counts.rows += len(found_SD)
        self.cache.put(key, found_SD)
        return found_SD

    def _adapter_of(self, row: int) -> int | None:
        """The number of the row's adapter; None: it has none."""
        table = None if self._language is None else self._language.adapters
        number = -1 if table is None else int(table.number_of_row[row])
        return None if number < 0 else number


def as_tensor(data: TensorData, device: torch.device) -> Tensor:
    """mel_MF. Raises ValueError: not float32."""
    if data.dtype != "float32":
        raise ValueError(f"a spectrogram of {data.dtype}")
    copied = bytearray(data.data)  # torch wants memory that may be written
    return torch.frombuffer(copied, dtype=torch.float32).view(data.shape).to(device)
