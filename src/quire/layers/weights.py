"""The weights of layers: the one interface to load, quantize, pack, move, offload and count them.

Knows where the tensors of a weight are, their names in checkpoints, and what multiplies by the weight. Does not know any
checkpoint format or quantization method: `quantization/` has them.

Shape suffixes: T tokens, I inputs, O outputs, W width of the result: O, or half of it if gated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from quire.forward_context import current_adapters
from quire.layers.checkpoint_tensor import CheckpointTensor
from quire.layers.prepared_weight import PANEL, PreparedWeight
from quire.layers.weight_slots import Layer, WeightSlot, set_parameter
from quire.ops.cpu.structs import CWeight
from quire.ops.lora import LoraTable, lora
from quire.ops.reference import act_and_mul, activate, linear
from quire.parallel.ranks import OutputSlice, RankGroup


class CheckpointFormat:
    """How a checkpoint stores a weight. The base: as one tensor in the model's dtype."""

    gives_floats = False
    """Whether the tensors come from an unquantized checkpoint, but `convert` quantizes them."""

    def stored(
        self, num_in: int, num_out: int, dtype: torch.dtype
    ) -> Mapping[str, CheckpointTensor]:
        """Name -> tensor; the name is the parameter's and the last component of the checkpoint's."""
        return {"weight": CheckpointTensor((num_out, num_in), dtype)}

    def convert(self, ref: WeightRef) -> Converted:
        """The weight that the loaded tensors represent."""
        return ref.tensor("weight")

    def finish(self) -> None:
        """Called when all weights are converted: a format may do the work of many weights together."""


UNQUANTIZED = CheckpointFormat()


Converted = PreparedWeight | Tensor
"""A weight, prepared or as floats [O, I]."""


class TensorRef(NamedTuple):
    """A tensor, and the object that has it as an attribute."""

    owner: nn.Module | PreparedWeight
    name: str
    tensor: Tensor

    def set(self, tensor: Tensor) -> None:
        """Replace the tensor."""
        if isinstance(self.owner, nn.Module):
            set_parameter(self.owner, self.name, tensor)
        else:
            setattr(self.owner, self.name, tensor)


class WeightRef:
    """One weight [O, I] of a layer, which multiplies by it. `Layer.weights` lists them.

    Args:
        layer: registers the tensors as its parameters.
        num_out: outputs; or parts {"q_proj": 64, "k_proj": 32, ...}, by their checkpoint names under the parent of
            `layer`. The weight concatenates the parts.
        bias: whether there is a bias [O].
        packed: the name under which some checkpoints store all parts concatenated.
        gated: the product is act(first half of the outputs) * second half.
        act: see `act_and_mul` (ops/reference.py). after: see `activate`, of a weight that is not gated; None: no activation.
        prefix: begins the names of the parameters, for a layer with several weights.
        exact: it is never quantized.
        dtype: of the weight; None: the model's.
        shares: for each part in order, the ranges of outputs that this rank has; `num_out` is their total.
            None: this rank has all outputs.

    Attributes:
        format: how the checkpoint stores it; `UNQUANTIZED` once it is loaded.
        prepared: what multiplies; None: the parameter `weight`.
    """

    is_head = False
    """Whether it computes logits: that allows less error than other weights."""
    lora: LoraTable | None = None
    """The factors of the loaded adapters."""
    input_ranks: RankGroup | None = None
    """The ranks that have a part of x each; None: x is whole."""
    output_ranks: RankGroup | None = None
    """The ranks that compute a part of y each, of which all is the product; None: the outputs are all that is wanted."""

    def __init__(
        self,
        layer: Layer,
        num_in: int,
        num_out: int | Mapping[str, int],
        *,
        bias: bool = False,
        packed: str | None = None,
        gated: bool = False,
        act: str = "silu",
        after: str | None = None,
        prefix: str = "",
        exact: bool = False,
        dtype: torch.dtype | None = None,
        shares: Sequence[OutputSlice] = (),
    ):
        self.exact, self.shares = exact, tuple(shares)
        self.layer, self.num_in, self.prefix = layer, num_in, prefix
        self.parts = dict(num_out) if isinstance(num_out, Mapping) else {}
        self.num_out = sum(self.parts.values()) if isinstance(num_out, Mapping) else num_out
        self.packed, self.gated, self.act, self.after = packed, gated, act, after
        self.dtype = dtype or torch.get_default_dtype()
        self.prepared: PreparedWeight | None = None
        self.stored: dict[str, CheckpointTensor] = {}
        self.use(UNQUANTIZED)
        layer.register_parameter(prefix + "bias", None)
        if bias:
            set_parameter(layer, prefix + "bias", torch.empty(self.num_out, dtype=self.dtype))

    # -- while the checkpoint is loaded
    def use(self, checkpoint_format: CheckpointFormat) -> None:
        """Set the checkpoint format and register its tensors, before any is loaded."""
        self._set_format(checkpoint_format)
        for name, stored in self.stored.items():
            empty = torch.empty(stored.shape_for(self.outputs), dtype=stored.dtype)
            set_parameter(self.layer, self.prefix + name, empty)

    def _set_format(self, checkpoint_format: CheckpointFormat) -> None:
        for name in self.stored:
            delattr(self.layer, self.prefix + name)
        self.format = checkpoint_format
        self.stored = dict(checkpoint_format.stored(self.num_in, self.num_out, self.dtype))

    def checkpoint_names(self, path: str) -> list[str]:
        """Name of each part in a checkpoint, for a layer at `path` in the model."""
        parent = path.rpartition(".")[0]
        return [f"{parent}.{part}" for part in self.parts] or [path]

    def slots(self, path: str) -> dict[str, WeightSlot]:
        """Checkpoint name -> slot, for a layer at `path` in the model."""
        tensors = dict(self.stored)
        if self.bias is not None:
            tensors["bias"] = CheckpointTensor((self.num_out,), self.dtype)
        found, cuts = {}, self._shares_of_parts()
        for name, stored in tensors.items():
            own = [stored.shares(cut, part) for part, cut in enumerate(cuts)] if self.shares else ()
            whole = WeightSlot(
                self.layer, self.prefix + name, per_part=stored.per_part, optional=stored.optional, ref=self,
                shares=tuple(share for cut in own for share in cut), cut=stored.dim,
            )  # fmt: skip
            if not self.parts:
                found[f"{path}.{name}"] = whole
                continue
            if self.packed:
                found[f"{path.rpartition('.')[0]}.{self.packed}.{name}"] = whole
            start, dim = 0, 0 if stored.per_part else stored.dim
            lengths = stored.lengths(self.outputs)
            for number, part in enumerate(self.checkpoint_names(path)):
                found[f"{part}.{name}"] = whole._replace(
                    dim=dim, start=start, length=lengths[number], shares=own[number] if own else ()
                )
                start += lengths[number]
        return found

    def _shares_of_parts(self) -> list[list[OutputSlice]]:
        """The shares of each part: those that together have its outputs."""
        found, left = [], list(self.shares)
        for outs in self.outputs:
            cut: list[OutputSlice] = []
            while left and sum(share.length for share in cut) < outs:
                cut.append(left.pop(0))
            found.append(cut)
        return found

    def convert(self) -> None:
        """Convert the loaded tensors of a quantized checkpoint; nothing if it is not quantized."""
        if self.format is UNQUANTIZED:
            return
        self.layer.join({self.prefix + "bias"})
        found = self.format.convert(self)
        if isinstance(found, PreparedWeight):
            self.install(found)
        else:
            self._set_format(UNQUANTIZED)
            set_parameter(self.layer, self.prefix + "weight", found.to(self.dtype))

    def pieces(self, name: str) -> list[tuple[int, Tensor]]:
        """The loaded tensor `name` as the files have it: (where a piece begins along dimension 0, the piece).

        The weight forgets them: what converts it keeps them as long as it needs them.
        """
        key = self.prefix + name
        into, found = self.layer.get_parameter(key), self.layer.deferred.get(key, ())
        usable = all(slot.dim == 0 and piece.dtype == into.dtype for slot, piece in found)
        if not found or not usable or sum(len(piece) for _, piece in found) != len(into):
            return [(0, self.tensor(name))]
        del self.layer.deferred[key]
        return sorted(((slot.start, piece) for slot, piece in found), key=lambda one: one[0])

    def join(self) -> None:
        """Store the deferred tensors of this weight."""
        self.layer.join({self.prefix + name for name in (*self.stored, "bias")})

    # -- once it is loaded
    def install(self, prepared: PreparedWeight) -> None:
        """Multiply by `prepared`, and free the other tensors."""
        self.prepared, prepared.act, prepared.after = prepared, self.act, self.after
        bias_O = prepared.pad_bias(self.bias)
        if bias_O is not None and bias_O is not self.bias:
            set_parameter(self.layer, self.prefix + "bias", bias_O)
        self._set_format(UNQUANTIZED)
        shape = torch.empty(prepared.outs, prepared.ins, dtype=self.dtype, device="meta")
        set_parameter(self.layer, self.prefix + "weight", shape)

    def multiply(self, x_TI: Tensor) -> Tensor:
        """y_TW: x times the weight transposed, plus bias; if gated, the gated product. Parts of ranks are gathered."""
        if self.input_ranks is not None:
            x_TI = self.input_ranks.gather(x_TI)
        y_TW = self._product(x_TI)
        return y_TW if self.output_ranks is None else self.output_ranks.gather(y_TW)

    def _product(self, x_TI: Tensor) -> Tensor:
        if self.lora is not None and (numbers_T := current_adapters(x_TI)) is not None:
            return self._product_with_adapters(x_TI, numbers_T, self.lora)
        if self.prepared is not None:
            return self.prepared.multiply(x_TI, self.bias)
        return self.after_product(linear(x_TI, self.weight, self.bias))

    def _product_with_adapters(self, x_TI: Tensor, numbers_T: Tensor, table: LoraTable) -> Tensor:
        """numbers_T: the adapter of each token; -1: none. Adapters are added before the activation. Tokens without an adapter
        keep their bits."""
        prepared = self.prepared
        if prepared is None:
            y_TO = linear(x_TI, self.weight, self.bias)
        else:
            y_TO = prepared.before_activation().multiply(x_TI, self.bias)
        y_TW = self.after_product(lora(x_TI, y_TO, numbers_T, table))
        if prepared is not None and self.after is not None:
            # The kernel's activation may have other bits; a gated product's activation has the same.
            base_TW = prepared.multiply(x_TI, self.bias)
            y_TW = torch.where((numbers_T >= 0)[:, None], y_TW, base_TW)
        return y_TW

    def after_product(self, y_TO: Tensor) -> Tensor:
        """The activation, if there is one."""
        if self.gated:
            return act_and_mul(y_TO, self.act)
        return y_TO if self.after is None else activate(y_TO, self.after)

    def kernel_weight(self, padded: bool = False) -> CWeight | None:
        """For the kernels; None if they do not multiply this weight, or its last panel is not full and not `padded`."""
        prepared, bias_O = self.prepared, self.bias
        if prepared is None or prepared.kernels is None:
            return None
        if prepared.outs % PANEL and not padded:
            return None
        ranks = self.input_ranks, self.output_ranks
        links = [None if each is None else each.link for each in ranks]
        if sum(each is not None for each in ranks) != sum(link is not None for link in links):
            return None  # the kernels cannot exchange with these ranks
        bias = None if bias_O is None else bias_O.data_ptr()
        lora = None if self.lora is None else self.lora.address
        return CWeight(
            **prepared.kernel_args(), bias=bias, outs=prepared.padded, ins=prepared.ins, lora=lora, x_ranks=links[0], y_ranks=links[1]
        )  # fmt: skip

    @property
    def outputs(self) -> list[int]:
        """Number of outputs of each part; of the weight, if it has no parts."""
        return list(self.parts.values()) or [self.num_out]

    @property
    def weight(self) -> Tensor:
        """weight_OI, unless `prepared` replaces it."""
        return self.layer.get_parameter(self.prefix + "weight")

    @property
    def bias(self) -> Tensor | None:
        return self.layer._parameters[self.prefix + "bias"]

    def tensor(self, name: str) -> Tensor:
        """The loaded tensor `name` of the checkpoint format."""
        self.layer.join({self.prefix + name})
        return self.layer.get_parameter(self.prefix + name).data

    def parameters(self) -> dict[str, Tensor]:
        """Name -> parameter of the layer; on "meta" while it has no memory."""
        names = (self.prefix + name for name in (*self.stored, "bias"))
        found = {name: self.layer._parameters[name] for name in names}
        return {name: each for name, each in found.items() if each is not None}

    def tensors(self) -> list[TensorRef]:
        """Everything of this weight that has memory."""
        found = [
            TensorRef(self.layer, name, each.data)
            for name, each in self.parameters().items()
            if not each.is_meta
        ]
        if self.prepared is not None:
            own = vars(self.prepared).items()
            found += [TensorRef(self.prepared, n, t) for n, t in own if isinstance(t, Tensor)]
        return found


def layer_weights(layer: Layer) -> list[WeightRef]:
    return [ref for ref in layer.weights() if isinstance(ref, WeightRef)]


def weights_of(model: nn.Module) -> list[WeightRef]:
    """The weights of all layers, the LM head's first: it is the largest, and to convert it takes temporary memory, which
    is free at the start."""
    layers = [module for module in model.modules() if isinstance(module, Layer)]
    refs = [ref for layer in layers for ref in layer_weights(layer)]
    return sorted(refs, key=lambda ref: not ref.is_head)


def weight_tensors(model: nn.Module) -> list[TensorRef]:
    """All tensors of all weights that have memory."""
    return [each for ref in weights_of(model) for each in ref.tensors()]
