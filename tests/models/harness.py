"""Runs a model by hand: batches, scattered blocks and caches, without scheduler or worker.

runner = Runner(model, block_size=16)
runner.add(0, [5, 7, 9])
logits = runner.step([(0, 3)])[0]        # [3, V]: of every token, not only the last
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from math import prod

import torch
from torch import Tensor, nn

from quire.attention.base import AttentionBackend
from quire.attention.kv_quantization import Part
from quire.attention.reference import ReferenceAttention
from quire.forward_context import ForwardBatch, forward_context
from quire.worker.row_states import RowStates

MAX_ROWS = 64  # of models with recurrent states


def make_batch(
    chunks: Sequence[tuple[int, int, Sequence[int]]],
    tables: Sequence[Sequence[int]],
    block_size: int,
    num_groups: int = 1,
) -> ForwardBatch:
    """One step of rows (row, first position, tokens); tables: the blocks of each of these rows."""
    queries = [len(tokens) for _, _, tokens in chunks]
    lengths = [first + len(tokens) for _, first, tokens in chunks]
    positions = [p for _, first, tokens in chunks for p in range(first, first + len(tokens))]
    slots = [
        table[p // block_size] * block_size + p % block_size
        for (_, first, tokens), table in zip(chunks, tables, strict=True)
        for p in range(first, first + len(tokens))
    ]
    wide = max(-(-length // block_size) for length in lengths)
    rows = [list(table[:wide]) + [0] * (wide - len(table)) for table in tables]
    ends = torch.tensor([0, *queries]).cumsum(0)
    return ForwardBatch(
        token_ids_T=torch.tensor([t for _, _, tokens in chunks for t in tokens]),
        positions_T=torch.tensor(positions),
        rows_B=torch.tensor([row for row, _, _ in chunks]),
        query_start_B1=ends.int(),
        lengths_B=torch.tensor(lengths, dtype=torch.int32),
        block_tables=[torch.tensor(rows, dtype=torch.int32)] * num_groups,
        slots=[torch.tensor(slots)] * num_groups,
        sample_at_S=ends[1:] - 1,
        max_query=max(queries),
        max_length=max(lengths),
        num_tokens=len(positions),
        num_rows=len(chunks),
        query_lens=queries,
        lengths=lengths,
    )


def spoiled(part: Part) -> Tensor:
    """A cache that nobody wrote to: every byte 255, which is NaN in every float format."""
    size = prod(part.shape) * part.dtype.itemsize
    return torch.full((size,), 255, dtype=torch.uint8).view(part.dtype).view(part.shape)


class Runner:
    """A model, its caches, and rows whose blocks are drawn at random from a pool full of NaN."""

    def __init__(
        self,
        model: nn.Module,
        *,
        block_size: int = 16,
        num_tokens: int = 2048,
        backend: AttentionBackend | None = None,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ):
        self.model, self.block_size = model, block_size
        self.num_blocks = -(-num_tokens // block_size) + 1
        self.free = list(range(1, self.num_blocks))  # block 0 is nobody's
        random.Random(seed).shuffle(self.free)
        self.tables: dict[int, list[int]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.shared: dict[int, int] = {}  # leading blocks that are another row's
        backend = backend or ReferenceAttention()
        for layer in model.attention_layers():
            spec = layer.spec.cache_spec(str(dtype).removeprefix("torch."))
            parts = backend.cache_parts(spec, self.num_blocks, block_size)
            layer.bind(backend, tuple(spoiled(part) for part in parts))
        self.states = RowStates(MAX_ROWS)
        if hasattr(model, "state_layers"):
            self.states.allocate(model.state_layers())
        for tensor in self.states.tensors:
            tensor.fill_(255)

    def add(self, row: int, tokens: Iterable[int]) -> None:
        self.tables[row], self.tokens[row], self.computed[row] = [], list(tokens), 0
        self.states.clear(row)

    def share(self, row: int, donor: int, tokens: Iterable[int]) -> int:
        """As `add`, on the full blocks that `donor` has computed and the texts have in common; their tokens."""
        self.add(row, tokens)
        if self.states.tensors:
            return 0  # there is no checkpoint of the state
        ours, theirs = self.tokens[row][:-1], self.tokens[donor][: self.computed[donor]]
        same = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        blocks = (min(len(ours), len(theirs)) if same is None else same) // self.block_size
        self.tables[row] = self.tables[donor][:blocks]
        self.shared[row] = blocks
        self.computed[row] = blocks * self.block_size
        return self.computed[row]

    def extras(self, chunks: Sequence[tuple[int, int, Sequence[int]]]) -> dict[str, Tensor]:
        """What features add to the batch of a step."""
        return {}

    def leave(self, row: int) -> None:
        self.free += self.tables.pop(row)[self.shared.pop(row, 0) :]
        del self.tokens[row], self.computed[row]
        if getattr(self.model, "per_request", False):
            self.model.forget([row])

    @torch.inference_mode()
    def step(self, work: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Run the next `n` tokens of each (row, n); returns logits [n, V] of each, in float32."""
        chunks = []
        for row, n in work:
            first = self.computed[row]
            tokens = self.tokens[row][first : first + n]
            if len(tokens) != n:
                raise ValueError(f"row {row} has no {n} tokens left")
            while len(self.tables[row]) * self.block_size < first + n:
                self.tables[row].append(self.free.pop())
            chunks.append((row, first, tokens))
            self.computed[row] += n
        batch = make_batch(chunks, [self.tables[row] for row, _ in work], self.block_size)
        batch.extras.update(self.extras(chunks))
        with forward_context(batch):
            hidden_TD = self.model(self.model.embed(batch.token_ids_T), batch.positions_T)
            logits_TV = self.model.logits(hidden_TD).float()
        return list(logits_TV.split([n for _, n in work]))

    def prefill(self, row: int, tokens: Sequence[int], chunk: int | None = None) -> Tensor:
        """All logits [len(tokens), V] of a new row, computed in chunks of `chunk`."""
        self.add(row, tokens)
        size = chunk or len(tokens)
        sizes = [min(size, len(tokens) - at) for at in range(0, len(tokens), size)]
        return torch.cat([self.step([(row, n)])[0] for n in sizes])

    def greedy(
        self, prompts: Sequence[Sequence[int]], count: int, chunk: int | None = None
    ) -> list[list[int]]:
        """`count` greedy tokens of each prompt, all rows together, prompts in chunks of `chunk`."""
        for row, prompt in enumerate(prompts):
            self.add(row, prompt)
        ends = [len(prompt) + count for prompt in prompts]
        while work := [
            (row, min(chunk or 10**9, len(self.tokens[row]) - self.computed[row]))
            for row in range(len(prompts))
            if len(self.tokens[row]) < ends[row]
        ]:
            for (row, _), logits in zip(work, self.step(work), strict=True):
                if self.computed[row] == len(self.tokens[row]):
                    self.tokens[row].append(int(logits[-1].argmax()))
        out = [self.tokens[row][len(prompt) :] for row, prompt in enumerate(prompts)]
        for row in range(len(prompts)):
            self.leave(row)
        return out
