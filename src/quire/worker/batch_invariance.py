"""Whether a model's bits depend on the batch: on other requests, on chunks, and on what is cached.

Knows what multiplies by each weight, and the attention backends. docs/design/determinism.md says why the sums of these are in
one order for any number of tokens. The answer is False where that is not proven, so it may be wrong in one direction only.
"""

from __future__ import annotations

import torch

from quire.attention.cpu import CpuAttention
from quire.attention.reference import ReferenceAttention
from quire.layers.weight_slots import Layer
from quire.layers.weights import WeightRef
from quire.models.base import LanguageModel


def is_batch_invariant(model: LanguageModel) -> bool:
    """Whether a request gets the same bits alone, in a batch, in one chunk or several, and after a preemption."""
    if model.description != "native" or not isinstance(model, torch.nn.Module):
        return False
    layers = (layer for layer in model.modules() if isinstance(layer, Layer))
    refs = [ref for layer in layers for ref in layer.weights() if isinstance(ref, WeightRef)]
    backends = {type(layer.backend) for layer in model.attention_layers()}
    # packed weights leave a parameter on the meta device
    if any(tensor.device.type not in ("cpu", "meta") for tensor in model.parameters()):
        return False
    if backends <= {ReferenceAttention} and all(_is_float32(ref) for ref in refs):
        return True
    return backends <= {CpuAttention} and not model.state_layers() and all(map(_is_ordered, refs))


def _is_float32(ref: WeightRef) -> bool:
    return ref.prepared is None and ref.dtype == torch.float32


def _is_ordered(ref: WeightRef) -> bool:
    """The CPU kernels multiply; or torch does in float32, as by a router."""
    return ref.prepared.kernels is not None if ref.prepared is not None else _is_float32(ref)
