"""Mixture layers: a router, experts, and maybe a shared expert.

Knows how checkpoints store experts. Does not know how they are chosen or multiplied (`ops/experts.py`).

    one tensor per expert       experts.7.gate_proj.weight [I, H], or w1, w3, w2; some families have no gate
    one tensor for all          experts.gate_up_proj [E, 2I, H] or [E, H, 2I], halves or alternating; input_linear.weight

Shape suffixes: T tokens, D features, E experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from quire.errors import ConfigError
from quire.layers.expert_parallel import CutExperts, PlacedExperts, can_move, split_experts
from quire.layers.linear import Linear
from quire.layers.pair_outputs import outputs_of_seats
from quire.layers.weight_slots import (
    Layer,
    Slot,
    StackedSlot,
    UnreadSlot,
    WeightSlot,
    set_parameter,
)
from quire.layers.weights import UNQUANTIZED, WeightRef
from quire.ops.experts import ExpertWeights, Routing, add_shared, experts, route, router_logits
from quire.ops.reference import rms_norm
from quire.parallel.expert_placement import Placement

PROJ = ("gate_proj", "up_proj", "down_proj")
W123 = ("w1", "w3", "w2")
"""Names of gate, up and down in checkpoints."""


class Router(Layer):
    """Chooses the experts of each token. Its weight is never quantized.

    Args:
        bias: whether the logits have one.
        correction: checkpoint name, under the parent of this layer, of a bias [E] that changes the choice alone.
        float32: computes the logits in float32.
    """

    may_defer = True

    def __init__(
        self,
        num_in: int,
        num_experts: int,
        how: Routing,
        *,
        bias: bool = False,
        correction: str | None = None,
        float32: bool = False,
    ):
        super().__init__()
        groups = max(how.groups, 1)
        if not 0 < how.k <= num_experts // groups * how.top_groups or num_experts % groups:
            raise ConfigError(
                f"config.json: a token cannot have {how.k} of {num_experts} experts, from {how.top_groups} of {groups} groups:"
                " check num_experts_per_tok, topk_group and n_group"
            )
        self.how, self.correction = how, correction
        dtype = torch.float32 if float32 else None
        self.ref = WeightRef(self, num_in, num_experts, bias=bias, exact=True, dtype=dtype)
        if correction is not None:
            set_parameter(self, "correction_E", torch.empty(num_experts, dtype=torch.float32))

    def weights(self) -> Iterable[WeightRef]:
        return (self.ref,)

    def slots(self, path: str) -> dict[str, Slot]:
        found = super().slots(path)
        if self.correction is not None:
            parent = path.rpartition(".")[0]
            found[f"{parent}.{self.correction}"] = found.pop(f"{path}.correction_E")
        return found

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """ids_TK int64, weights_TK float32"""
        if self.ref.dtype == torch.float32 and self.ref.lora is None:
            logits_TE = router_logits(x_TD, self.ref.weight, self.ref.bias)
        else:
            logits_TE = self.ref.multiply(x_TD.to(self.ref.dtype))
        return route(logits_TE, self._parameters.get("correction_E"), self.how)


class ScaledRouter(Layer):
    """Gemma 4: scores a normed and scaled input, and multiplies each expert's weight by a scale."""

    scale: Tensor
    per_expert_scale: Tensor

    def __init__(self, num_in: int, num_experts: int, how: Routing, eps: float):
        super().__init__()
        self.proj, self.eps = Router(num_in, num_experts, how), eps
        self.new("scale", num_in)
        self.new("per_expert_scale", num_experts)

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """As of a `Router`."""
        x_TD = rms_norm(x_TD, None, self.eps) * self.scale * x_TD.shape[1] ** -0.5
        ids_TK, weights_TK = self.proj(x_TD)
        return ids_TK, weights_TK * self.per_expert_scale[ids_TK]


class Experts(Layer):
    """down(act(gate(x)) * up(x)) of each chosen expert, times the router's weights, summed.

    A checkpoint may store each expert's weights, or one tensor for all of them, in either orientation.

    Args:
        inner: inner size of an expert.
        act: "silu", "gelu", "gelu_pytorch_tanh", "clamped_swiglu"; or "relu2": down(relu(up(x)) ** 2), without a gate.
        names: of gate, up and down under `experts.7.` in checkpoints.
        stacked: names of the tensors for all experts, under the parent of this layer.
        by_expert: whether an unquantized checkpoint may store each expert's weights.
        transposed: tensors for all experts are [E, in, out]; it counts where their shape does not show it.
        interleaved: in these tensors, outputs of gate and up alternate.
        on_input: a router's weight multiplies the expert's input, not its output (Llama 4).
    """

    may_defer = True

    def __init__(
        self,
        num_in: int,
        inner: int,
        num_experts: int,
        *,
        act: str = "silu",
        bias: bool = False,
        names: tuple[str, str, str] = PROJ,
        stacked: tuple[str, str] = ("experts.gate_up_proj", "experts.down_proj"),
        by_expert: bool = True,
        transposed: bool = False,
        interleaved: bool = False,
        on_input: bool = False,
    ):
        super().__init__()
        self.stacked, self.by_expert, self.on_input = stacked, by_expert, on_input
        self.transposed, self.interleaved = transposed, interleaved
        self.num_experts, self.split = num_experts, split_experts(num_in, inner, num_experts)
        gated = act != "relu2"
        first = names[:2] if gated else names[1:2]
        cuts = (self.split.inner, self.split.out) if isinstance(self.split, CutExperts) else None
        own_inner, own_out = (cut.length for cut in cuts) if cuts else (inner, num_in)
        inner_shares, out_shares = ([cuts[0]] * len(first), cuts[1:]) if cuts else ((), ())
        up, down = [], []
        for seat, e in enumerate(self.numbers):
            parts = {f"experts.{e}.{name}": own_inner for name in first}
            up.append(
                WeightRef(
                    self, num_in, parts, bias=bias, gated=gated, act=act, prefix=f"up_{seat}_", shares=inner_shares
                )
            )  # fmt: skip
            parts = {f"experts.{e}.{names[2]}": own_out}
            down.append(
                WeightRef(self, inner, parts, bias=bias, prefix=f"down_{seat}_", shares=out_shares)
            )
        self.of = ExpertWeights(up, down, act)
        self.refs: Sequence[WeightRef] = (*up, *down)

    @property
    def numbers(self) -> Sequence[int]:
        """The experts whose weights this rank has, in the order of these weights."""
        if self.split is None or isinstance(self.split, CutExperts):
            return range(self.num_experts)
        return self.split.experts

    def weights(self) -> Iterable[WeightRef]:
        return self.refs

    def slots(self, path: str) -> dict[str, Slot]:
        if any(not (ref.format is UNQUANTIZED or ref.format.gives_floats) for ref in self.refs):
            return self._by_expert(path)
        found = self._by_expert(path) if self.by_expert else {}
        parent, half = path.rpartition(".")[0], len(self.refs) // 2
        for refs, called in zip((self.refs[:half], self.refs[half:]), self.stacked, strict=True):
            names = {"weight": called}
            if refs[0].bias is not None:
                names["bias"] = f"{called}_bias"
            for name, stored in names.items():
                found[f"{parent}.{stored}"] = StackedSlot(
                    [
                        WeightSlot(self, ref.prefix + name, ref=ref, shares=ref.shares)
                        for ref in refs
                    ],
                    transposed=self.transposed,
                    interleaved=self.interleaved and refs[0].gated,
                    is_alternative=self.by_expert,
                    numbers=self.numbers,
                    total=self.num_experts,
                )
        return found

    def _by_expert(self, path: str) -> dict[str, Slot]:
        """Those of each expert's weights. The tensors of experts that only other ranks have are not read."""
        own = super().slots(path)
        absent, number = set(range(self.num_experts)) - set(self.numbers), self.numbers[0]
        begin = f"experts.{number}."
        others = [
            name.replace(begin, f"experts.{e}.", 1) for name in own if begin in name for e in absent
        ]
        return {**own, **dict.fromkeys(others, UnreadSlot(self))}

    @property
    def is_placed(self) -> bool:
        """Whether each rank has whole experts."""
        return isinstance(self.split, PlacedExperts)

    def can_move(self) -> bool:
        """Whether experts may take the places of others; once the weights are loaded."""
        return self.is_placed and can_move(self._seats())

    def move(self, where: Placement) -> int:
        """Give the ranks' seats these experts; the number of this rank's seats that changed."""
        if not isinstance(self.split, PlacedExperts):
            raise TypeError("each rank has a part of every expert")
        seats = self._seats()
        changed = self.split.move(where, seats)
        for refs, number in zip(seats, self.numbers, strict=True):
            for ref in refs:
                names = (name.rpartition(".")[2] for name in ref.parts)
                ref.parts = {
                    f"experts.{number}.{name}": outs
                    for name, outs in zip(names, ref.outputs, strict=True)
                }
        self.of.prepared = None  # it has addresses of tensors that may be others now
        return changed

    def _seats(self) -> list[tuple[WeightRef, WeightRef]]:
        half = len(self.refs) // 2
        return list(zip(self.refs[:half], self.refs[half:], strict=True))

    def outputs_of_seats(self, x_ND: Tensor, seat_N: Tensor) -> Tensor:
        """y_ND: of each row, the output of this worker's expert in that seat. Raises ValueError: they do not fit this layer."""
        seats, features = len(self.numbers), self.refs[0].num_in
        if x_ND.shape[1] != features or ((seat_N < 0) | (seat_N >= seats)).any():
            raise ValueError(f"this layer has {seats} experts for {features} features")
        return outputs_of_seats(x_ND, seat_N, self.of)

    def forward(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """y_TD"""
        compute = experts if self.split is None else self.split
        if not self.on_input:
            return compute(x_TD, ids_TK, weights_TK, self.of)
        count, k = ids_TK.shape
        x_ND = (x_TD[:, None] * weights_TK[..., None].to(x_TD.dtype)).flatten(0, 1)
        y_ND = compute(
            x_ND, ids_TK.reshape(-1, 1), torch.ones_like(weights_TK).view(-1, 1), self.of
        )
        return y_ND if k == 1 else y_ND.view(count, k, -1).float().sum(1).to(x_TD.dtype)


class MoE(nn.Module):
    """The weighted sum of each token's experts, plus a shared expert's output.

    Args:
        shared: an MLP for every token.
        shared_gate: features of the input, if a sigmoid of it scales the shared output; 0: none does.
        checkpoint_names: of `gate`, `experts`, `shared` and `shared_gate`.
    """

    def __init__(
        self,
        gate: nn.Module,
        experts: nn.Module,
        shared: nn.Module | None = None,
        *,
        shared_gate: int = 0,
        checkpoint_names: Mapping[str, str] | None = None,
    ):
        super().__init__()
        self.gate, self.experts, self.shared = gate, experts, shared
        self.shared_gate = Linear(shared_gate, 1, exact=True) if shared_gate else None
        shared_name = "shared_expert" if shared_gate else "shared_experts"
        names = {"shared": shared_name, "shared_gate": "shared_expert_gate"}
        self.checkpoint_names = {**names, **(checkpoint_names or {})}

    def forward(self, x_TD: Tensor) -> Tensor:
        y_TD: Tensor = self.experts(x_TD, *self.gate(x_TD))
        if self.shared is None:
            return y_TD
        gate_T1 = None if self.shared_gate is None else self.shared_gate(x_TD)
        return add_shared(y_TD, self.shared(x_TD), gate_T1)
