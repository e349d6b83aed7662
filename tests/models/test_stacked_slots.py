"""One checkpoint tensor that holds the weights of many experts, and names of modules that checkpoints call otherwise."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from quire.errors import ConfigError
from quire.layers.linear import Linear
from quire.layers.weight_slots import Layer, StackedSlot, WeightSlot, slots_of
from quire.layers.weights import WeightRef

EXPERTS, IN, OUT = 3, 5, 4
CPU = torch.device("cpu")


class Stack(Layer):
    may_defer = True

    def __init__(self) -> None:
        super().__init__()
        self.refs = [WeightRef(self, IN, OUT, bias=True, prefix=f"{e}_") for e in range(EXPERTS)]

    def weights(self) -> list[WeightRef]:
        return self.refs


def slot_of(stack: Stack, name: str, **how: bool) -> StackedSlot:
    return StackedSlot([WeightSlot(stack, ref.prefix + name, ref=ref) for ref in stack.refs], **how)


def stored(wanted: Tensor, transposed: bool, interleaved: bool) -> Tensor:
    if interleaved:  # outputs: first of the first half, first of the second half, ...
        order = torch.tensor([0, OUT // 2, 1, OUT // 2 + 1])
        wanted = wanted[:, order]
    return wanted.transpose(1, 2).contiguous() if transposed else wanted


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("told", [False, True])
def test_each_weight_gets_its_slice(transposed: bool, interleaved: bool, told: bool) -> None:
    """The shape shows the orientation."""
    with torch.device("meta"):
        stack = Stack()
    wanted = torch.randn(EXPERTS, OUT, IN)
    slot = slot_of(stack, "weight", transposed=told, interleaved=interleaved)
    tensor = stored(wanted, transposed, interleaved)
    slot.fill(tensor, CPU, "experts.weight")
    if not (transposed or interleaved):  # no copy
        first = stack.refs[0].weight
        assert first.data_ptr() == tensor.data_ptr()
    else:  # none before a layer needs it
        assert all(ref.weight.is_meta for ref in stack.refs)
    for ref, want in zip(stack.refs, wanted, strict=True):
        ref.join()
        assert torch.equal(ref.weight, want)
        assert ref.weight.is_contiguous()


@pytest.mark.parametrize("transposed", [False, True])
def test_the_model_says_the_orientation_of_square_weights(transposed: bool) -> None:
    with torch.device("meta"):
        stack = Layer()
        ref = WeightRef(stack, OUT, OUT, prefix="0_")
    slot = StackedSlot([WeightSlot(stack, "0_weight", ref=ref)], transposed=transposed)
    tensor = torch.randn(1, OUT, OUT)
    slot.fill(tensor, CPU, "experts.weight")
    stack.join()
    assert torch.equal(ref.weight, tensor[0].T if transposed else tensor[0])


@pytest.mark.parametrize("interleaved", [False, True])
def test_biases_have_no_orientation(interleaved: bool) -> None:
    with torch.device("meta"):
        stack = Stack()
    wanted = torch.randn(EXPERTS, OUT)
    slot = slot_of(stack, "bias", transposed=True, interleaved=interleaved)
    slot.fill(stored(wanted, False, interleaved), CPU, "experts.bias")
    stack.join()
    assert torch.equal(torch.stack([stack._parameters[f"{e}_bias"] for e in range(3)]), wanted)


@pytest.mark.parametrize("shape", [(2, OUT, IN), (EXPERTS, OUT, IN + 1), (EXPERTS * OUT, IN)])
def test_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with torch.device("meta"):
        slot = slot_of(Stack(), "weight")
    with pytest.raises(ConfigError, match=r"experts.weight has shape .* requires \[3, 4, 5\]"):
        slot.fill(torch.zeros(shape), CPU, "experts.weight")


def test_names_of_modules_in_checkpoints() -> None:
    with torch.device("meta"):
        model, block = nn.Module(), nn.Module()
        model.mlp, block.first, block.second = block, Linear(2, 2), Linear(2, 2)
    assert list(slots_of(model)) == ["mlp.first.weight", "mlp.second.weight"]
    model.checkpoint_names = {"mlp": "block_sparse_moe"}
    block.checkpoint_names = {"first": "a.b", "second": ""}
    assert list(slots_of(model)) == ["block_sparse_moe.a.b.weight", "block_sparse_moe.weight"]
