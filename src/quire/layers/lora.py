"""LoRA adapters of a model: their weights by module name, packed for the model's own weights, and which are loaded.

Knows the names of a model's weights and the rows' adapters. Does not know files or requests.

Shape suffixes: T tokens, R rank, I inputs, O outputs, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire.errors import ValidationError
from quire.forward_context import ADAPTERS, ForwardBatch
from quire.layers.embedding import Embedding, Head
from quire.layers.linear import Linear
from quire.layers.moe import Router
from quire.layers.weight_slots import named_layers, own_part
from quire.layers.weights import WeightRef, layer_weights
from quire.ops.lora import LANES, LoraFactors, LoraTable, NewPart
from quire.parallel.ranks import OutputSlice

if TYPE_CHECKING:
    from quire.protocol.plan import StepPlan

ROWS_AT_ONCE = 256  # of a weight, while it is decoded


@dataclass
class LoraWeights:
    """What an adapter has for one module of a checkpoint, as its file stores it.

    Attributes:
        a_RI, b_OR: None if only a bias was trained. Of an embedding: [R, V] and [D, R].
        scale: factor of the product.
        bias_O: added to the output, already times the scale (`lora_bias`).
        base_bias_O: replaces the module's bias.
        magnitude_O: of DoRA.
    """

    a_RI: Tensor | None
    b_OR: Tensor | None
    scale: float = 1.0
    bias_O: Tensor | None = None
    base_bias_O: Tensor | None = None
    magnitude_O: Tensor | None = None
    is_embedding: bool = False


class Target(Protocol):
    """A weight that adapters may change, [num_out, num_in], maybe with a `bias`; `WeightRef` is one. Of a table: words are its
    inputs."""

    lora: LoraTable | None
    num_in: int
    num_out: int


class Place(NamedTuple):
    """Where a module of a checkpoint is in a model: outputs [start, start + outs) of a weight.

    `rows`: gives the weight's rows [first, last) as floats [O, I]; None: of a table. `shares`: of the module's outputs, this
    rank has these parts, one after the other; none: all. `stored`: (inputs, outputs) of the module in checkpoints, where they
    are fewer: the weight ends with zeros.
    """

    target: Target
    start: int
    outs: int
    rows: Callable[[int, int], Tensor] | None
    shares: tuple[OutputSlice, ...] = ()
    stored: tuple[int, int] | None = None

    @property
    def sizes(self) -> tuple[int, int]:
        """(inputs, outputs) of the module in checkpoints; of an embedding, words and features."""
        return self.stored or (self.target.num_in, self.all_outs)

    @property
    def all_outs(self) -> int:
        """Outputs of the module, with the outputs of other ranks."""
        return sum(share.total for share in self.shares) or self.outs

    def own(self, weights: LoraWeights) -> LoraWeights:
        """What this rank has of a module's weights, with the zeros at their ends: every rank multiplies all inputs by A."""

        def cut(tensor: Tensor | None) -> Tensor | None:
            if tensor is None:
                return None
            more = (0, 0) * (tensor.dim() - 1) + (0, self.all_outs - len(tensor))
            return own_part(F.pad(tensor, more) if more[-1] else tensor, self.shares)

        if not self.shares and self.stored is None:
            return weights
        a_RI = weights.a_RI
        return replace(
            weights,
            a_RI=None if a_RI is None else F.pad(a_RI, (0, self.target.num_in - a_RI.shape[1])),
            b_OR=cut(weights.b_OR),
            bias_O=cut(weights.bias_O),
            base_bias_O=cut(weights.base_bias_O),
            magnitude_O=cut(weights.magnitude_O),
        )


def places_of(model: nn.Module) -> dict[str, Place]:
    """By module name in checkpoints: where adapters may be applied in a native model."""
    found: dict[str, Place] = {}
    for path, layer in named_layers(model):
        if isinstance(layer, Embedding):
            found[path] = Place(layer, 0, layer.num_out, None)
        if not isinstance(layer, Linear | Head | Router):
            continue
        (ref,) = layer_weights(layer)
        rows, start = _rows_of(ref), 0
        if ref.parts and ref.packed:
            packed = f"{path.rpartition('.')[0]}.{ref.packed}"
            found[packed] = Place(ref, 0, ref.num_out, rows, ref.shares)
        for number, name in enumerate(ref.checkpoint_names(path)):
            outs, shares = ref.outputs[number], ref.shares
            own = shares[number : number + 1] if ref.parts else shares
            found[name] = Place(ref, start, outs, rows, own)
            start += outs
    return found


def lora_targets(model: Any) -> dict[str, tuple[int, int]]:
    """By module name in checkpoints, inputs and outputs of what adapters may change; of an embedding, words and features."""
    return {name: place.sizes for name, place in all_places(model).items()}


class AdaptedEncoder(Protocol):
    """Encodes pictures or sound for a model, beside it; adapters may change it."""

    def adapter_places(self) -> Mapping[str, Place]:
        """As of a model, by names of its own."""
        ...

    def adapter_name(self, module: str) -> str | None:
        """What `adapter_places` would call a module that checkpoints call `module`; "": it is not the encoder's; None: it is of a
        layer that the encoder leaves out."""
        ...


OF_ENCODER = "~"
"""Begins the names of places of encoders, which are the last in an ordered list."""


def all_places(model: Any) -> dict[str, Place]:
    """The places of a model and of its encoders."""
    found = dict(model.adapter_places())
    for encoder in model.encoders:
        found |= {OF_ENCODER + name: place for name, place in encoder.adapter_places().items()}
    return found


def encoder_place(model: Any, module: str) -> str | None:
    """What `all_places` would call a module of an encoder that checkpoints call `module`; "", None: as `AdaptedEncoder.adapter_name`."""
    names = [encoder.adapter_name(module) for encoder in model.encoders]
    if None in names:
        return None
    return next((OF_ENCODER + name for name in names if name), "")


def _rows_of(ref: WeightRef) -> Callable[[int, int], Tensor]:
    def rows(first: int, last: int) -> Tensor:
        prepared = ref.prepared
        if prepared is None:
            return ref.weight[first:last].float()
        if prepared.rows is not None and not ref.gated:
            return prepared.rows(torch.arange(first, last)).float()
        # Each input alone gives a column.
        plain = prepared.before_activation() if ref.gated else prepared
        one_hot_II = torch.eye(ref.num_in, dtype=ref.dtype, device=ref.tensors()[0].tensor.device)
        columns = [
            plain.multiply(some)[:, first:last].float() for some in one_hot_II.split(ROWS_AT_ONCE)
        ]
        return torch.cat(columns).T

    return rows


def accelerator_of(model: nn.Module) -> torch.device | None:
    """The device of the model's weights; None: the CPU."""
    device = next((each.device for each in model.parameters() if not each.is_meta), None)
    return None if device is None or device.type == "cpu" else device


class AdapterTable:
    """The loaded adapters of a model, and which rows use them. It attaches itself to the model's weights.

    Args:
        capacity: how many adapters are loaded at most.
        max_rows: of the worker.
        max_rank: of an adapter, on an accelerator.

    Attributes:
        number_of_row: by the worker's row, the number of its adapter; -1: none.
    """

    def __init__(self, model: Any, capacity: int, max_rows: int, max_rank: int = 64):
        self.places: Mapping[str, Place] = all_places(model)
        self.dtype, self.device = model.dtype, accelerator_of(model)
        if self.device is not None:  # a table of embeddings is looked up on the host's word
            self.places = {n: place for n, place in self.places.items() if place.rows is not None}
        self.loaded: list[AdapterWeights | None] = [None] * capacity
        self.number_of_row = np.full(max_rows, -1, np.int64)
        parts = Counter(id(place.target) for place in self.places.values())
        for place in self.places.values():
            if place.target.lora is None:
                width = max_rank * parts[id(place.target)]
                place.target.lora = LoraTable(capacity, self.device, self.dtype, width)
        model.adapters = self

    def prepare(
        self, modules: Mapping[str, LoraWeights], dtype: torch.dtype | None = None
    ) -> AdapterWeights:
        """Pack an adapter; `dtype`: of A and B, None: the model's. It may run in another thread than the model.

        Raises:
            ValidationError: modules that the model does not have, or tensors of another shape.
        """
        dtype = dtype if dtype is not None and self.device is None else self.dtype
        if self.dtype == torch.bfloat16 and dtype == torch.float16:
            dtype = torch.float32  # the kernels multiply these two
        found = AdapterWeights(self.places, modules, dtype)
        if self.device is not None:
            for _, factors in found.factors:
                factors.move(self.device)
        return found

    def add(self, number: int, weights: AdapterWeights) -> None:
        """Load an adapter, between steps."""
        self.remove(number)
        for target, factors in weights.factors:
            if target.lora is not None:
                target.lora.set(number, factors)
        self.loaded[number] = weights

    def remove(self, number: int) -> None:
        """Unload an adapter, between steps. No row may use it."""
        weights, self.loaded[number] = self.loaded[number], None
        for target, _ in () if weights is None else weights.factors:
            if target.lora is not None:
                target.lora.set(number, None)

    def put(self, plan: StepPlan, batch: ForwardBatch) -> None:
        """Add the tokens' adapters to a batch, if a row has one."""
        numbers_B = self._numbers(plan)
        if (numbers_B < 0).all():
            return
        numbers_T = np.full(len(batch.token_ids_T), -1, np.int64)
        numbers_T[: batch.num_tokens] = np.repeat(numbers_B, batch.query_lens)
        device, encoder = batch.token_ids_T.device, batch.encoder
        batch.extras[ADAPTERS] = torch.from_numpy(numbers_T).to(device)
        if encoder is not None:
            lengths = np.asarray(encoder.lengths)[encoder.new_rows]
            numbers_S = np.repeat(numbers_B[encoder.new_rows], lengths)
            encoder.adapters_S = torch.from_numpy(numbers_S).to(device)

    def number_for_encoders(self, row: int) -> int:
        """The number of the row's adapter, if it changes encoders; else -1."""
        number = int(self.number_of_row[row])
        weights = self.loaded[number] if number >= 0 else None
        return number if weights is not None and weights.changes_encoders else -1

    def accepts_fast_step(self, plan: StepPlan) -> bool:
        """Whether the fast path can apply the adapters of all rows."""
        used = {int(number) for number in self._numbers(plan) if number >= 0}
        return all(
            each is not None and each.fits_fast_step for each in map(self.loaded.__getitem__, used)
        )

    def _numbers(self, plan: StepPlan) -> np.ndarray:
        return self.number_of_row[[item.row for item in plan.work]]


class AdapterWeights:
    """One adapter, packed for a model's weights. `AdapterTable.prepare` makes it.

    Attributes:
        rank: the largest of its modules.
        num_bytes: of its tensors in memory.
        fits_fast_step: whether the fast path can apply it.
        changes_encoders: whether it has weights for the model's encoders.
    """

    def __init__(
        self, places: Mapping[str, Place], modules: Mapping[str, LoraWeights], dtype: torch.dtype
    ):
        if unknown := sorted(set(modules) - set(places)):
            raise ValidationError(
                f"the adapter has weights for modules that the model does not have: {_listed(unknown)}; "
                f"it was trained for another model, or for modules that take no adapter here"
            )
        by_target: dict[int, list[tuple[str, Place, LoraWeights]]] = {}
        for name, weights in modules.items():
            place = places[name]
            _check(name, place, weights)
            of_target = by_target.setdefault(id(place.target), [])
            of_target.append((name, place, place.own(weights)))
        self.factors: list[tuple[Target, LoraFactors]] = []
        for group in by_target.values():
            self.factors.append((group[0][1].target, _factors(group, dtype)))
        ranks = [len(each.a_RI) for each in modules.values() if each.a_RI is not None]
        self.rank = max(ranks, default=0)
        self.num_bytes = sum(t.nbytes for _, each in self.factors for t in each.tensors())
        of_model = [name for name in modules if not name.startswith(OF_ENCODER)]
        self.fits_fast_step = all(places[name].rows is not None for name in of_model)
        self.changes_encoders = len(of_model) < len(modules)


def _check(name: str, place: Place, weights: LoraWeights) -> None:
    """Raises ValidationError: a tensor has a shape that does not fit the model."""
    is_table = place.rows is None
    if is_table != weights.is_embedding:
        kind = "an embedding table" if is_table else "a linear layer"
        raise ValidationError(
            f"the adapter's factors of {name} do not fit: it is {kind} in the model"
        )
    num_in, outs = place.sizes
    a_RI, b_OR = weights.a_RI, weights.b_OR
    if is_table and (weights.magnitude_O is not None or a_RI is None):
        raise ValidationError(
            f"the adapter uses DoRA for {name}, an embedding table: train it without"
        )
    if (a_RI is None) != (b_OR is None):
        raise ValidationError(f"the adapter has only one of the two factors of {name}")
    rank = 0 if a_RI is None else len(a_RI)
    vectors = (weights.bias_O, weights.base_bias_O, weights.magnitude_O)
    expected = [(a_RI, [rank, num_in], "A"), (b_OR, [outs, rank], "B")]
    expected += [(each, [outs], "bias or magnitude") for each in vectors]
    for tensor, want, kind in expected:
        if tensor is not None and list(tensor.shape) != want:
            raise ValidationError(
                f"the adapter's {kind} of {name} has shape {list(tensor.shape)}; this model needs {want}: "
                "the adapter was trained for another model"
            )


def _factors(group: list[tuple[str, Place, LoraWeights]], dtype: torch.dtype) -> LoraFactors:
    """The factors of all modules that are parts of one weight."""
    target = group[0][1].target
    gain_O, offset_O = torch.ones(target.num_out), torch.zeros(target.num_out)
    parts = []
    for name, place, each in group:
        here = slice(place.start, place.start + place.outs)
        parts.append(NewPart(place.start, place.outs, each.scale, each.a_RI, each.b_OR))
        if each.magnitude_O is not None:
            norms_O = _row_norms(place, each)
            if place.stored is not None:  # rows of zeros, whose outputs nobody reads
                norms_O[place.stored[1] :] = 1
            gain_O[here] = each.magnitude_O.float() / norms_O
        offset_O[here] = _offset(place, each, gain_O[here])
        if not bool((gain_O[here] + offset_O[here]).isfinite().all()):
            raise ValidationError(f"the adapter's bias or magnitude of {name} is not finite")
    return LoraFactors(
        target.num_in, target.num_out, sorted(parts, key=lambda part: part.start), dtype,
        gain_O if bool((gain_O != 1).any()) else None,
        offset_O if bool((offset_O != 0).any()) else None,
    )  # fmt: skip


def _offset(place: Place, each: LoraWeights, gain_O: Tensor) -> Tensor:
    """DoRA scales W x + s B A x + bias of B, without the base's bias: the output is gain * (W x + base bias + s B A x) + offset."""
    base_O = torch.zeros(place.outs)
    if (bias_O := getattr(place.target, "bias", None)) is not None:
        base_O = bias_O.detach().float().cpu()[place.start : place.start + place.outs]
    bias_O = torch.zeros(place.outs) if each.bias_O is None else each.bias_O.float()
    final_O = base_O if each.base_bias_O is None else each.base_bias_O.float()
    return gain_O * (bias_O - base_O) + final_O


def _row_norms(place: Place, each: LoraWeights) -> Tensor:
    """Of W + s B A, computed for so few rows at once that a rank which has a part of them gets the same bits."""
    if place.rows is None:
        raise TypeError("a table has no rows of outputs")
    weight_OI = place.rows(place.start, place.start + place.outs)
    if each.a_RI is None or each.b_OR is None:
        return weight_OI.norm(dim=1)
    norms = []
    for rows, b_OR in zip(weight_OI.split(LANES), each.b_OR.float().split(LANES), strict=True):
        norms.append((rows.cpu() + each.scale * (b_OR @ each.a_RI.float())).norm(dim=1))
    return torch.cat(norms)


def _listed(names: Iterable[str], most: int = 8) -> str:
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
