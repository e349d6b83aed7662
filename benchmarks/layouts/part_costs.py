"""PartCosts of a model: what one rank has and exchanges, read off its part of the model, constructed without weights.

Knows layers and their weights. Does not know devices or links.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from benchmarks.layouts.costs import PartCosts
from quire.config.engine import ModelSpec, Resolved
from quire.errors import QuireError
from quire.layers.decoder_layer import SelfAttention
from quire.layers.embedding import Embedding
from quire.layers.linear import Linear
from quire.layers.moe import Experts, Router
from quire.layers.weight_slots import Layer
from quire.layers.weights import WeightRef, layer_weights
from quire.models.base import CausalLM
from quire.parallel.layout import RankLayout
from quire.protocol.tensor_data import ITEMSIZE
from quire.worker.memory_forecast import construct_part, forecast_weights

UNBOUNDED = 1 << 62  # bytes
"""What `forecast_weights` may plan with: the devices of the plan are other ones than this machine has."""
MANY_TOKENS = 1 << 12
"""For averages of a token: which rank computes an expert depends on the tokens."""
BYTES = {"int8": 1.0, "fp8": 1.0, "int4": 0.5}


def part_costs(resolved: Resolved, ranks: int) -> PartCosts:
    """Raises Unsupported: the model has no native class."""
    spec = resolved.spec
    model, item = construct_part(spec, RankLayout(tensor=ranks)), ITEMSIZE[resolved.dtype]
    specs = [layer.spec for layer in model.attention_layers()]
    of_experts = [m for m in model.modules() if isinstance(m, Experts)]
    routers = [m for m in model.modules() if isinstance(m, Router)]
    experts = sum(_size(ref) for each in of_experts for ref in layer_weights(each))
    every = [
        ref for each in model.modules() if isinstance(each, Layer) for ref in layer_weights(each)
    ]
    head = sum(_size(ref) for ref in every if ref.is_head)
    table = sum(m.words * m.num_out for m in model.modules() if isinstance(m, Embedding))
    dense = sum(_size(ref) for ref in every if not ref.is_head) - experts
    numbers, of_weight = sum(p.numel() for p in model.parameters()), bytes_of_weight(spec)
    config = model.cfg
    return PartCosts(
        tensor=ranks,
        num_layers=config.num_hidden_layers,
        weights=numbers * of_weight,
        item=of_weight,
        ends=(table if config.tie_word_embeddings else table + head) * of_weight,
        end=max(table, head) * of_weight,
        dense=dense,
        head=head,
        experts=experts,
        chosen=routers[0].how.k / routers[0].ref.num_out if routers else 0.0,
        kv=sum(each.cache_spec(resolved.kv_dtype).bytes_per_token for each in specs),
        attention=sum(each.num_heads * (each.head_dim + each.v_head_dim) for each in specs),
        inner_widths=tuple(width * item for width in inner_exchanges(model)),
        drawn_widths=tuple(width * item for width in drawn_exchanges(model)),
        hidden=config.hidden_size * item,
    )


def bytes_of_weight(spec: ModelSpec) -> float:
    """Of one number of the weights: from the files' headers, if they are here; else from the dtype."""
    if spec.quantization is not None:
        return BYTES.get(spec.quantization, 1.0)
    try:
        whole = forecast_weights(spec, "cuda", UNBOUNDED)
    except QuireError:
        return ITEMSIZE[spec.dtype]
    return whole / sum(p.numel() for p in construct_part(spec).parameters())


def drawn_exchanges(model: CausalLM) -> list[int]:
    """Of each exchange of the LM head: the logits of a token that one rank gives."""
    head = model.lm_head
    return [] if head is None or head.ref.output_ranks is None else [head.ref.num_out]


def inner_exchanges(model: nn.Module) -> Iterator[int]:
    """Of each exchange in the layers: the features of a token that one rank gives."""
    chosen = next((m.how.k for m in model.modules() if isinstance(m, Router)), 0)
    for layer in model.modules():
        if isinstance(layer, Experts) and layer.split is not None:
            inputs = layer.refs[0].num_in
            for rows, width in layer.split.exchanges(MANY_TOKENS, chosen, inputs):
                yield rows * width // MANY_TOKENS
        if isinstance(layer, Embedding) and layer.ranks is not None:
            yield layer.num_out
        if isinstance(layer, SelfAttention) and layer.ranks is not None and layer.full_qk_norm:
            yield sum(layer.sizes[:2])
        if isinstance(layer, Linear) and (ranks := layer.ref.input_ranks) is not None:
            yield layer.ref.num_in // ranks.size
        if isinstance(layer, Linear) and layer.ref.output_ranks is not None:
            yield layer.ref.num_out


def _size(ref: WeightRef) -> int:
    return ref.num_in * ref.num_out
