"""Adapter for logits processors of vLLM's second interface (`vllm.v1.worker.gpu.sample.logits_processor`).

Such a processor keeps state by slot, which is a row here, and reads tokens where the worker keeps them:

    add_request(slot, params) -> bool    a request takes a slot; whether the processor changes its logits
    apply(logits [P, V], context)        the rows of this step that use the processor

Rows that use one get no draft tokens, so each has one row of logits.

Shape suffixes: S rows that draw, P of them that use the processor, R slots, L token positions, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.protocol.plan import EnteredRow
from quire.protocol.sampling_params import SamplingParams
from quire.worker.request_rows import RequestRows
from quire.worker.sampling.logits_processors import Processor, ProcessorRows


@dataclass(frozen=True)
class SlotNumbers:
    """A number for each slot, int64 [R]: `np` on the host, `gpu` on the device."""

    np: np.ndarray
    device: torch.device

    @property
    def gpu(self) -> Tensor:
        return torch.from_numpy(self.np).to(self.device)


@dataclass(frozen=True)
class SlotTokens:
    """The tokens of each slot, int32 [R, L]: `gpu`, as in vLLM."""

    gpu: Tensor


@dataclass(frozen=True)
class LogitsProcRequestState:
    """What a processor may read of all requests."""

    device: torch.device
    max_num_reqs: int
    vocab_size: int
    all_token_ids: SlotTokens
    prompt_len: SlotNumbers
    prefill_len: SlotNumbers
    """Tokens when the request took its slot: the prompt, and the output before a preemption."""
    total_len: SlotNumbers
    """Tokens before the one that is drawn."""


@dataclass(frozen=True)
class LogitsContext:
    """One call: which slot each row of logits belongs to. int64 [P]."""

    expanded_idx_mapping: Tensor
    idx_mapping: Tensor
    idx_mapping_np: np.ndarray
    expanded_local_pos: Tensor
    input_ids: Tensor
    """The last token before the one that is drawn."""
    pos: Tensor
    """Its position."""
    seq_lens_upper_bound_np: np.ndarray
    """Tokens before the one that is drawn."""


class SlotLogitsProcessor(ABC):
    """vLLM's second interface. One instance serves all requests of a worker."""

    def __init__(self, vllm_config: Any, req_states: LogitsProcRequestState) -> None:
        return

    @classmethod  # noqa: B027 - may be left as it is
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise ValueError if these parameters cannot be served."""

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Begin the state of a slot. Whether the processor changes the request's logits."""
        return True

    def apply_staged_writes(self) -> None:  # noqa: B027
        """Called before `apply`, when the tokens of new requests are in their slots."""

    @abstractmethod
    def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        """Change logits [P, V], in place or in a new tensor."""


class SlotProcessorAdapter(Processor):
    """Makes a Processor of a class of vLLM's second interface."""

    def __init__(self, kind: type, config: Any, rows: RequestRows, vocab_size: int):
        device, count = rows.device, rows.max_rows
        self.state = LogitsProcRequestState(
            device=device, max_num_reqs=count, vocab_size=vocab_size,
            all_token_ids=SlotTokens(rows.token_ids_RL),
            prompt_len=SlotNumbers(rows.num_prompt, device),
            prefill_len=SlotNumbers(np.zeros(count, np.int64), device),
            total_len=SlotNumbers(np.zeros(count, np.int64), device),
        )  # fmt: skip
        self.inner = kind(config, self.state)

    @property
    def name(self) -> str:
        return type(self.inner).__name__

    def validate(self, params: SamplingParams) -> None:
        self.inner.validate_params(params)

    def enter(self, new: EnteredRow) -> bool:
        self.state.prefill_len.np[new.row] = self.state.total_len.np[new.row] = len(new.tokens)
        return bool(self.inner.add_request(new.row, new.sampling_params))

    def apply(self, logits_SV: Tensor, selected: ProcessorRows) -> Tensor:
        rows_P, lengths_P = selected.rows, selected.lengths
        self.state.total_len.np[rows_P] = lengths_P
        slots_P, last_P = selected.state.tensor(rows_P), selected.state.tensor(lengths_P - 1)
        context = LogitsContext(
            expanded_idx_mapping=slots_P, idx_mapping=slots_P, idx_mapping_np=rows_P,
            expanded_local_pos=torch.zeros_like(slots_P),
            input_ids=selected.state.tokens(rows_P, lengths_P - 1), pos=last_P,
            seq_lens_upper_bound_np=lengths_P,
        )  # fmt: skip
        self.inner.apply_staged_writes()
        at_P = selected.state.tensor(selected.indices)
        logits_PV = logits_SV[at_P]
        changed_PV = self.inner.apply(logits_PV, context)
        if not isinstance(changed_PV, Tensor) or changed_PV.shape != logits_PV.shape:
            raise TypeError(f"apply must return logits of shape {tuple(logits_PV.shape)}")
        logits_SV[at_P] = changed_PV.to(logits_SV.dtype)
        return logits_SV


def is_slot_processor(kind: type) -> bool:
    """Whether a class has the methods of the second interface."""
    return all(callable(getattr(kind, name, None)) for name in ("add_request", "apply"))
