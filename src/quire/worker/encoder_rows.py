"""EncoderRows: the encoder's states of each row, for models with cross attention.

Knows how many states a row has, and whether their keys and values are written. Does not know what the encoder reads, or who
runs it: a hook puts the states of rows that enter into `ForwardBatch.encoder`.

    enter   a row takes its encoder length; nothing is written
    build   the first batch with the row says that its keys and values are to be written; later batches only read them

Shape suffixes: B rows of this step, S encoder states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from quire.forward_context import EncoderStates

if TYPE_CHECKING:
    from torch import Tensor

    from quire.forward_context import ForwardBatch


class EncoderRows:
    """Encoder lengths by row. `groups`: the KV groups with keys and values of encoder states."""

    def __init__(self, groups: Sequence[int], max_rows: int, block_size: int):
        self.groups, self.block_size = groups, block_size
        self.length = np.zeros(max_rows, np.int64)
        self.is_written = np.zeros(max_rows, bool)

    def enter(self, row: int, num_encoder_tokens: int) -> None:
        """A request takes the row; its states have to be written (again, after a preemption)."""
        self.length[row], self.is_written[row] = num_encoder_tokens, False

    def add_to(
        self,
        batch: ForwardBatch,
        rows_B: np.ndarray,
        blocks: Sequence[np.ndarray],
        tensor: Callable[[np.ndarray], Tensor],
    ) -> None:
        """Give a batch its encoder lengths, and the groups' block tables and slots. The rows count as written from now on.

        blocks: by KV group, the blocks of all rows. tensor: moves an array to the device.
        """
        length_B = self.length[rows_B]
        new_B = (~self.is_written[rows_B]).nonzero()[0]
        self.is_written[rows_B] = True
        batch.encoder = EncoderStates(length_B.tolist(), new_B.tolist())
        size = self.block_size
        width = -(-int(length_B.max()) // size)
        places = [np.arange(length) for length in length_B[new_B]]
        place_S = np.concatenate(places) if places else np.zeros(0, np.int64)
        row_S = np.repeat(rows_B[new_B], length_B[new_B])
        for group in self.groups:
            batch.block_tables[group] = tensor(blocks[group][rows_B, :width])
            first_S = blocks[group][row_S, place_S // size].astype(np.int64) * size
            batch.slots[group] = tensor(first_S + place_S % size)
