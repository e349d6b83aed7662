"""Rows: the state that a worker keeps for each running request, so that plans need not repeat it.

Knows tokens, counts, blocks and sampling parameters, by row. Does not know batches, models or how to sample.
The sampler writes drawn tokens here, on the device, and the next step reads them here: that is why no plan
carries them.

    token_ids_RL   on the device: prompt, then output as it is drawn
    the rest       on the host, so that reading it needs no device synchronization

Shape suffixes: R rows, L token positions, M blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from quire.platforms.memory import lazy_zeros
from quire.protocol.plan import EnteredRow, WorkItem
from quire.protocol.sampling_params import SamplingParams
from quire.worker.encoder_rows import EncoderRows

MAX_TOKEN_ID = 2**31 - 1


class RequestRows:
    """State of up to `max_rows` requests. `enter` takes a row and `leave` frees it.

    max_encoder_lens: by KV group of cross attention, the most encoder states of a row; None: there is no such group.
    """

    def __init__(
        self,
        max_rows: int,
        max_model_len: int,
        num_groups: int,
        block_size: int,
        device: torch.device | str = "cpu",
        max_encoder_lens: Mapping[int, int] | None = None,
    ):
        self.max_rows, self.max_model_len, self.block_size = max_rows, max_model_len, block_size
        self.device = torch.device(device)
        # Lazy: a high max_model_len uses no memory until requests are that long.
        self.token_ids_RL = lazy_zeros((max_rows, max_model_len + 1), torch.int32, self.device)
        # The same memory as a numpy array, if it is on the host: numpy's indexing costs a fraction of torch's.
        self._host_RL = self.token_ids_RL.numpy() if self.device.type == "cpu" else None
        self.num_prompt = np.zeros(max_rows, np.int64)
        self.num_computed_tokens = np.zeros(max_rows, np.int64)
        # rotary positions of a row beyond its token positions, in steps whose batch has no ROPE_POSITIONS; hooks set it in `enter`
        self.rope_offset = np.zeros(max_rows, np.int64)
        self.length = np.zeros(max_rows, np.int64)  # number of tokens, those being drawn included
        self.accepts_drafts = np.zeros(max_rows, bool)  # the model output sets it
        # how many of these, the last ones, are draft tokens
        self.num_drafts = np.zeros(max_rows, np.int64)
        encoder_lens = max_encoder_lens or {}
        groups = sorted(encoder_lens)
        self.encoder = EncoderRows(groups, max_rows, block_size) if groups else None
        max_blocks = -(-max([max_model_len + 1, *encoder_lens.values()]) // block_size)
        self.blocks = [np.zeros((max_rows, max_blocks), np.int32) for _ in range(num_groups)]
        self.num_blocks = np.zeros((max(num_groups, 1), max_rows), np.int64)
        self.params: list[SamplingParams | None] = [None] * max_rows
        self.ids: list[str | None] = [None] * max_rows
        self.num_entered = [0] * max_rows  # how many requests took the row so far
        self.vocab_size = MAX_TOKEN_ID + 1  # the worker sets its model's
        self.faults: dict[int, str] = {}  # rows whose requests fail when they run

    def enter(self, new: EnteredRow) -> None:
        """Put a request into its row. One with token ids outside the vocabulary fails when it runs.

        Raises:
            RuntimeError: the row is in use, or the request does not fit: the plan is wrong.
        """
        row, length = new.row, len(new.tokens)
        if self.ids[row] is not None:
            raise RuntimeError(f"row {row} belongs to {self.ids[row]!r}; {new.id!r} cannot use it")
        if length > self.max_model_len or not 0 <= new.num_computed_tokens < length:
            raise RuntimeError(
                f"{new.id!r} enters with {length} tokens, {new.num_computed_tokens} of them computed;"
                f" a row holds {self.max_model_len}"
            )
        self.ids[row] = new.id
        self.params[row] = new.params if isinstance(new.params, SamplingParams) else None
        self.num_entered[row] += 1
        tokens: Sequence[int] = new.tokens
        if min(tokens) < 0 or max(tokens) >= self.vocab_size:
            self.faults[row] = f"prompt has a token id outside the vocabulary of {self.vocab_size}"
            tokens = [0] * length  # the model's table has no embeddings of its ids
        self.write_tokens(row, 0, tokens)
        self.num_prompt[row], self.length[row] = new.num_prompt, length
        self.num_computed_tokens[row] = new.num_computed_tokens
        self.num_drafts[row] = 0
        self.num_blocks[:, row] = 0
        if self.encoder is not None:
            self.encoder.enter(row, new.num_encoder_tokens)
        self.add_blocks(row, new.blocks)

    def write_tokens(self, row: int, start: int, tokens: Sequence[int]) -> None:
        """Write tokens into a row, from position `start` on."""
        end = start + len(tokens)
        if self._host_RL is not None:
            self._host_RL[row, start:end] = tokens
        else:
            self.token_ids_RL[row, start:end] = torch.tensor(tokens, dtype=torch.int32)

    def tokens(self, rows_T: np.ndarray, places_T: np.ndarray) -> Tensor:
        """The tokens at these rows and positions, int64, on the device."""
        if self._host_RL is not None:
            return torch.from_numpy(self._host_RL[rows_T, places_T].astype(np.int64))
        return self.token_ids_RL[self.tensor(rows_T), self.tensor(places_T)].long()

    def tokens_of(self, row: int, start: int, end: int) -> list[int]:
        """Some tokens of a row, on the host."""
        if self._host_RL is not None:
            found: list[int] = self._host_RL[row, start:end].tolist()
            return found
        return [int(token) for token in self.token_ids_RL[row, start:end].tolist()]

    def last_tokens(self, row: int, count: int) -> list[int]:
        """The last tokens of a row without draft tokens, on the host."""
        return self.tokens_of(row, int(self.length[row]) - count, int(self.length[row]))

    def write_sampled(self, rows_S: np.ndarray, places_S: np.ndarray, tokens_S: Tensor) -> None:
        """Write drawn tokens, on the device."""
        if self._host_RL is not None:
            self._host_RL[rows_S, places_S] = tokens_S.numpy()
        else:
            index = self.tensor(rows_S), self.tensor(places_S)
            self.token_ids_RL[index] = tokens_S.to(torch.int32)

    def tensor(self, array: np.ndarray) -> Tensor:
        """A tensor on the device; on the CPU it shares the array's memory."""
        tensor = torch.from_numpy(array)
        return tensor if self._host_RL is not None else tensor.to(self.device, non_blocking=True)

    def add_blocks(self, row: int, blocks: Sequence[Sequence[int]]) -> None:
        """Append blocks to a row's block tables, by KV group; an empty list if no group grew."""
        for group, new in enumerate(blocks):
            if new:
                start = int(self.num_blocks[group, row])
                self.blocks[group][row, start : start + len(new)] = new
                self.num_blocks[group, row] = start + len(new)

    def leave(self, row: int) -> None:
        """Free a row. Raises RuntimeError: it is not in use."""
        if self.ids[row] is None:
            raise RuntimeError(f"row {row} is freed, but no request has it")
        self.ids[row] = self.params[row] = None
        self.length[row] = self.num_drafts[row] = self.rope_offset[row] = 0
        self.accepts_drafts[row] = False
        self.faults.pop(row, None)

    def faults_of(self, work: Sequence[WorkItem]) -> dict[int, str]:
        """By index of the work item: why its request fails."""
        if not self.faults:
            return {}
        items = ((index, self.faults.get(item.row)) for index, item in enumerate(work))
        return {index: fault for index, fault in items if fault is not None}

    def append(self, row: int, tokens: Sequence[int]) -> None:
        """Append tokens that are certain. No step in flight may draw at these positions."""
        self.put_drafts(row, ())  # draft tokens need not continue the new tokens
        self.write_tokens(row, self.length.item(row), tokens)
        self.length[row] += len(tokens)

    def put_drafts(self, row: int, drafts: Sequence[int]) -> None:
        """Append draft tokens, which the next step verifies, in the place of those that the row has."""
        known = self.length.item(row) - self.num_drafts.item(row)
        if drafts:
            self.write_tokens(row, known, drafts)
        self.length[row], self.num_drafts[row] = known + len(drafts), len(drafts)

    def drafts_of(self, row: int) -> list[int]:
        """A row's draft tokens, on the host."""
        length, count = int(self.length[row]), int(self.num_drafts[row])
        return self.tokens_of(row, length - count, length) if count else []

    def take_back(self, rows: np.ndarray | int, lengths: np.ndarray | int) -> None:
        """A step has verified the rows' draft tokens: `lengths` of their tokens are right, and the last is not computed."""
        self.length[rows], self.num_computed_tokens[rows] = lengths, lengths - 1
        self.num_drafts[rows] = 0

    def grow(self, work: Sequence[WorkItem]) -> None:
        """Add the new blocks of this step's work to the block tables."""
        for item in work:
            if item.new_blocks:
                self.add_blocks(item.row, item.new_blocks)

    def advance(self, rows_B: np.ndarray, ends_B: np.ndarray, samples_B: np.ndarray) -> None:
        """Record that tokens up to `ends_B` are computed or in flight, and that some rows draw one more."""
        self.num_computed_tokens[rows_B] = ends_B
        self.length[rows_B] = np.maximum(self.length[rows_B], ends_B + samples_B)
