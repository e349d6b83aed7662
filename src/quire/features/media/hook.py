"""MediaHook: puts rows of a tower in the place of the embeddings of the tokens of pictures, videos and sound.

An item is encoded when a step computes the first of its tokens; later steps find the rows in the cache, or encode it again
(`item_encoder.py`). Knows rows, and where items are in them. Does not know the tower.

Shape suffixes: T tokens of this step, N tokens of an item in this step, D features, F features of all layers of the tower that the
language model takes, L tokens of a prompt, C components.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from quire.features.media.item_encoder import ItemEncoder, Wanted
from quire.features.media.positions import item_positions
from quire.forward_context import ForwardBatch, SeenSpan
from quire.protocol.media import AUDIO, KINDS, TowerInput, decode_input
from quire.protocol.plan import EnteredRow, StepPlan
from quire.worker.hooks import Hook
from quire.worker.model_input import ROPE_POSITIONS

if TYPE_CHECKING:
    from quire.models.base import LanguageModel
    from quire.models.media import MediaModel
    from quire.worker.request_rows import RequestRows


class PlacedItem(NamedTuple):
    """A picture, video or sound in a request's row. The item has the tokens [start, end) of the row; `key` is the item's digest."""

    key: str
    kind: str
    start: int
    end: int
    item: TowerInput


@dataclass(slots=True)
class RowItems:
    """The items of a row; `end`: of the last one, or of a prompt whose tokens all attend to each other. `adapter`: the version of the
    row's LoRA adapter. `positions_LC`: see `item_positions`; None: the model's positions are indices."""

    items: list[PlacedItem]
    end: int
    adapter: str | None = None
    positions_LC: np.ndarray | None = None

    def parts(self, start: int, end: int) -> Iterator[tuple[PlacedItem, np.ndarray, np.ndarray]]:
        """The items that give rows to the tokens [start, end), each with what `tokens_in` says."""
        for one in self.items:
            if one.start < end and one.end > start:
                place_N, which_N = tokens_in(one, start, end)
                if len(place_N):
                    yield one, place_N, which_N


class MediaHook(Hook):
    """The only user of `encoder`."""

    name = "media"
    order = 20

    def __init__(self, rows: RequestRows, encoder: ItemEncoder, model: MediaModel):
        self.rows, self.encoder, self.model = rows, encoder, model
        self.of_row: dict[int, RowItems] = {}
        self._language: LanguageModel | None = None

    def use_models(self, models: Sequence[LanguageModel]) -> None:
        """The tower is loaded and dropped with the language model."""
        self._language = models[0] if isinstance(models[0], nn.Module) else None
        self.encoder.drop_tower()
        if self._language is not None:
            self.encoder.load_tower()
            self._language.encoders = [tower] if (tower := self.encoder.tower) else []

    def clear_cache(self) -> bool:
        self.encoder.cache.clear()
        return True

    def enter(self, new: EnteredRow) -> None:
        items = [
            PlacedItem(
                one.hash, one.kind, one.start, one.start + one.length, decode_input(one.data)
            )
            for one in new.media
            if one.kind in KINDS
        ]
        if not items:
            return
        is_one_span = self.model.both_ways == "prompt"
        end = new.num_prompt if is_one_span else items[-1].end
        found = RowItems(items, end, new.adapter)
        if self.model.has_grid:
            places = [(one.start, one.item) for one in items]
            found.positions_LC, offset = item_positions(places)
            self.rows.rope_offset[new.row] = offset
        self.of_row[new.row] = found

    def leave(self, row: int) -> None:
        self.of_row.pop(row, None)

    def accepts_fast_step(self, plan: StepPlan) -> bool:
        """False while a step computes tokens up to the end of an item; `rope_offset` moves the later ones."""
        if not self.of_row:
            return True
        starts = self.rows.num_computed_tokens
        return not any(
            (own := self.of_row.get(item.row)) is not None and starts[item.row] < own.end
            for item in plan.work
        )

    def before(self, plan: StepPlan, batch: ForwardBatch | None) -> None:
        if batch is None or not self.of_row:
            return
        rows = self.encoder.rows_of(list(self._wanted(plan, batch)))
        at, moved = 0, []
        for index, (item, count, end) in enumerate(
            zip(plan.work, batch.query_lens, batch.lengths, strict=True)
        ):
            own, start = self.of_row.get(item.row), end - count
            if own is not None and start < own.end:
                self._replace_embeddings(batch, item.row, own, rows, at - start, start, end)
                if self.model.both_ways == "prompt":
                    length = min(end, own.end) - start
                    batch.spans.append(SeenSpan(at, length, index, start, own.end, ignores_windows=True))  # fmt: skip
                elif self.model.both_ways:
                    only = self.model.both_ways == "windows"
                    batch.spans += seen_spans(own.items, index, at, start, end, only)
                if own.positions_LC is not None:
                    moved.append((at, start, end, own))
            at += count
        if moved:
            self._set_positions(batch, moved)

    def report(self) -> bytes | None:
        counts = self.encoder.take_counts()
        return msgspec.msgpack.encode(counts) if counts.lookups else None

    # -- embeddings -------------------------------------------------------------------------------
    def _wanted(self, plan: StepPlan, batch: ForwardBatch) -> Iterator[Wanted]:
        """The items of which the step computes tokens."""
        for item, count, end in zip(plan.work, batch.query_lens, batch.lengths, strict=True):
            if (own := self.of_row.get(item.row)) is not None:
                number = self._adapter_of(item.row)
                for one, _, _ in own.parts(end - count, end):
                    yield Wanted(self._key(own, one, number), one.item, number)

    def _adapter_of(self, row: int) -> int:
        """The number of the row's adapter, if it changes the tower; else -1."""
        table = None if self._language is None else self._language.adapters
        return -1 if table is None else table.number_for_encoders(row)

    @staticmethod
    def _key(own: RowItems, one: PlacedItem, number: int) -> str:
        """The item's name in the cache: rows of one adapter never serve another."""
        return one.key if number < 0 else f"{own.adapter} {one.key}"

    def _replace_embeddings(
        self,
        batch: ForwardBatch,
        row: int,
        own: RowItems,
        rows: Mapping[str, Tensor | Exception],
        shift: int,
        start: int,
        end: int,
    ) -> None:
        """For the tokens [start, end) of a row; token i of the row is token i + shift of the step."""
        number = self._adapter_of(row)
        for one, place_N, which_N in own.parts(start, end):
            rows_NF = rows[self._key(own, one, number)]
            if isinstance(rows_NF, Exception):
                self.rows.faults[row] = f"the tower cannot encode an item of the kind {one.kind} ({type(rows_NF).__name__})"  # fmt: skip
                return
            device = batch.token_ids_T.device
            at_N = torch.from_numpy(place_N + shift).to(device)
            first_ND, *inner = rows_NF[torch.from_numpy(which_N).to(device)].chunk(1 + self.model.inner_layers, -1)  # fmt: skip
            batch.embeddings.append((at_N, first_ND))
            if self.model.read_as is not None:
                batch.token_ids_T[at_N] = self.model.read_as
            for layer, state_ND in enumerate(inner, 1):
                batch.added_states.setdefault(layer, []).append((at_N, state_ND))

    # -- positions --------------------------------------------------------------------------------
    def _set_positions(
        self, batch: ForwardBatch, moved: Sequence[tuple[int, int, int, RowItems]]
    ) -> None:
        """Positions of three components for all tokens of the step: of rows without grids three times the same."""
        positions_T = batch.extras.get(ROPE_POSITIONS, batch.positions_T)
        positions_TC = positions_T[:, None].repeat(1, 3)
        for at, start, end, own in moved:
            if own.positions_LC is None:
                continue
            known_NC = own.positions_LC[start : min(end, own.end)]
            new_NC = torch.from_numpy(known_NC).to(positions_TC.device)
            positions_TC[at : at + len(new_NC)] = new_NC
        batch.extras[ROPE_POSITIONS] = positions_TC


def seen_spans(
    items: Sequence[PlacedItem], row: int, at: int, start: int, end: int, windows_only: bool
) -> Iterator[SeenSpan]:
    """The runs of rows in the tokens [start, end) of a row, whose first is token `at` of the step; each sees itself whole. Sound does not.

    A step has all later tokens of a run: the gate cuts no item. `row`: of the batch.
    """
    for one in items:
        for offset, length in one.item.runs if one.kind != AUDIO else ():
            first, last = one.start + offset, one.start + offset + length
            if first < end and last > start:
                seen = max(first, start)
                yield SeenSpan(at + seen - start, last - seen, row, seen, last, windows_only)


def tokens_in(placed: PlacedItem, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Of the tokens [start, end) of a prompt those that take rows of the item: their indices, and which rows."""
    place_N = np.concatenate(
        [np.arange(length) + placed.start + offset for offset, length in placed.item.runs]
    )
    which_N = np.flatnonzero((place_N >= start) & (place_N < end))
    return place_N[which_N], which_N
