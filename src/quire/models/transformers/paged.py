"""Mode "paged": a Transformers model that uses Quire's attention.

Knows the attention interface of Transformers and what one forward pass shows of each layer (`probe`).
Does not know blocks, batches or backends: `layers/attention.py` does. For an attention name without a
registered mask function, Transformers makes no mask at all, so a pass over [1, T] may contain any number
of requests, each continued from any position.

Shape suffixes: T tokens of this step, H query heads, K key/value heads, D head size (of values: E).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from quire.layers.attention import Attention

ATTENTION = "quire"
PROBE = "quire-probe"
HANDLE = "quire_attention"
"""The attribute of a Transformers attention module that has Quire's layer."""
PROBE_TOKENS = 6


class PagingError(Exception):
    """This model cannot run paged; the message is a clause that says why."""


@dataclass(frozen=True)
class MaskRule:
    """Which keys a token sees: all before it, or the last `size`, or those in its chunk of `size`."""

    kind: str  # "full", "window", "chunk", "other"
    size: int = 0


@dataclass
class AttentionCall:
    """What one layer passed to the attention interface."""

    module: nn.Module
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    num_queries: int
    num_keys: int
    mask: MaskRule | None  # None: the layer got no mask
    options: dict[str, Any]  # the keyword arguments that were not None


# ------------------------------------------------------------------------------------------- running


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention function: [1, H, T, D], [1, K, T, D], [1, K, T, E] -> [1, T, H, E] contiguous."""
    layer: Attention = getattr(module, HANDLE)
    out_THE = layer(
        query[0].transpose(0, 1).contiguous(),
        key[0].transpose(0, 1).contiguous(),
        value[0].transpose(0, 1).contiguous(),
    )
    return out_THE.reshape(1, query.shape[2], query.shape[1], value.shape[3]), None


def attach(calls: list[AttentionCall], max_model_len: int) -> list[Attention]:
    """Make a Quire attention layer for each call, and attach it to the module that made the call.

    Raises:
        PagingError: a call needs something that Quire's attention does not support.
    """
    layers = [_layer(call, index, max_model_len) for index, call in enumerate(calls)]
    for call, layer in zip(calls, layers, strict=True):
        # Not through nn.Module.__setattr__: TransformersModel owns and registers the layer.
        call.module.__dict__[HANDLE] = layer
    return layers


def detach(calls: list[AttentionCall]) -> None:
    for call in calls:
        call.module.__dict__.pop(HANDLE, None)


# ------------------------------------------------------------------------------------------- probing

_calls: list[AttentionCall] | None = None
_masks: list[tuple[Tensor, MaskRule]] = []
_probing = threading.Lock()  # two loads at once take turns


@contextmanager
def _recording() -> Iterator[list[AttentionCall]]:
    global _calls
    with _probing:
        _calls = []
        try:
            yield _calls
        finally:
            _calls = None
            _masks.clear()


def probe(model: PreTrainedModel, forward: Callable[[Tensor, Tensor], Any]) -> list[AttentionCall]:
    """Run one forward pass over a few tokens and record each layer's attention call.

    Args:
        forward: called with ids and positions, [1, T] each; must run the decoder without a cache.

    Raises:
        PagingError: some layer does not call the attention interface exactly once.
    """
    register()
    before = model.config._attn_implementation
    config = model.config.get_text_config(decoder=True)
    ids_1T = (torch.arange(PROBE_TOKENS, device=model.device) % int(config.vocab_size))[None]
    set_attention(model, PROBE)
    try:
        with _recording() as calls:
            forward(ids_1T, torch.arange(PROBE_TOKENS, device=model.device)[None])
    except PagingError:
        raise
    except Exception as error:  # model code may fail in any way with an unexpected mask
        raise PagingError(f"a pass failed in its code ({type(error).__name__}: {error})") from error
    finally:
        set_attention(model, before)
    _check_calls(calls, config)
    return calls


def register() -> None:
    """Register the two attention names with Transformers; a repeated call changes nothing."""
    AttentionInterface.register(ATTENTION, attend)
    AttentionInterface.register(PROBE, _record)
    AttentionMaskInterface.register(PROBE, _record_mask)


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Make `name` the attention implementation of every layer.

    Raises:
        PagingError: the model's code does not use the attention interface.
    """
    if not model._can_set_attn_implementation():
        raise PagingError(
            "its attention does not go through the attention interface of Transformers"
        )
    model.set_attn_implementation(name)


def _check_calls(calls: list[AttentionCall], config: Any) -> None:
    num_layers = int(config.num_hidden_layers)
    if len({id(call.module) for call in calls}) != len(calls):
        raise PagingError("a layer calls attention more than once in a pass")
    if len(calls) != num_layers:
        raise PagingError(
            f"{len(calls)} of its {num_layers} layers go through the attention interface, "
            "so the others may see the tokens of other requests"
        )


def _record(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    **options: Any,
) -> tuple[Tensor, None]:
    if _calls is None:
        raise RuntimeError(f"attention {PROBE!r} is for probing only")
    if query.shape[0] != 1 or query.ndim != 4 or query.shape[1] % key.shape[1]:
        raise PagingError(f"a layer passes queries of shape {tuple(query.shape)}")
    _calls.append(
        AttentionCall(
            module=module,
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_dim=query.shape[3],
            v_head_dim=value.shape[3],
            num_queries=query.shape[2],
            num_keys=key.shape[2],
            mask=_rule_of(attention_mask),
            options={name: value for name, value in options.items() if value is not None},
        )
    )
    # Any values of the right shape will do: return each token's own value.
    groups = query.shape[1] // value.shape[1]
    return value.repeat_interleave(groups, 1).transpose(1, 2).contiguous(), None


def _record_mask(
    *args: Any, mask_function: Callable[..., Any], local_size: int | None = None, **kwargs: Any
) -> Any:
    """Make the mask that eager attention would get, and remember it with its rule."""
    kwargs["allow_is_causal_skip"] = False  # else there may be no mask to record
    mask = eager_mask(*args, mask_function=mask_function, local_size=local_size, **kwargs)
    # Over so few tokens a wide window equals no window: mark each mask by its diagonal, which hides no score.
    mask.diagonal(dim1=-2, dim2=-1).fill_(-1.0 - len(_masks))
    _masks.append((mask, _rule(mask_function, local_size)))
    return mask


def _rule_of(mask: Any) -> MaskRule | None:
    """The rule of the mask that a layer got, recognized by identity or by equal values."""
    if mask is None:
        return None
    if isinstance(mask, Tensor):
        for other, rule in _masks:
            if other is mask or (other.shape == mask.shape and torch.equal(other, mask)):
                return rule
    return MaskRule("other")


def _rule(mask_function: Callable[..., Any], local_size: int | None) -> MaskRule:
    """Find the rule that agrees with the mask function at selected positions."""
    size = local_size or 0
    places = (
        sorted({0, 1, size - 1, size, size + 1, 2 * size, 2 * size + size // 2, 3 * size + 1})
        if size
        else [0, 1, 2, 7, 40, 1000]
    )
    candidates = [MaskRule("window", size), MaskRule("chunk", size)] if size else [MaskRule("full")]
    zero = torch.tensor(0)
    for rule in candidates:
        if all(
            bool(mask_function(zero, zero, torch.tensor(q), torch.tensor(k))) == _sees(rule, q, k)
            for q in places
            for k in sorted({0, 1, max(0, q - size), max(0, q - size + 1), max(0, q - 1), q, q + 1})
        ):
            return rule
    return MaskRule("other")


def _sees(rule: MaskRule, query: int, key: int) -> bool:
    if key > query:
        return False
    if rule.kind == "window":
        return key > query - rule.size
    if rule.kind == "chunk":
        return key // rule.size == query // rule.size
    return True


# ------------------------------------------------------------------------------------------- translating

_HARMLESS = frozenset(
    "cache_position dropout is_causal logits_to_keep output_attentions output_hidden_states output_router_logits"
    " position_ids return_dict scaling sliding_window softcap s_aux use_cache".split()
)


def _layer(call: AttentionCall, index: int, max_model_len: int) -> Attention:
    options = call.options
    if call.num_keys != call.num_queries or options.get("is_causal") is False:
        raise PagingError("a layer does not use causal attention")
    if strange := sorted(
        k for k, v in options.items() if k not in _HARMLESS and isinstance(v, Tensor)
    ):
        raise PagingError(f"a layer passes {', '.join(strange)} to attention")
    sinks = options.get("s_aux")
    if sinks is not None and sinks.numel() != call.num_heads:
        raise PagingError(f"a layer passes attention sinks of shape {tuple(sinks.shape)}")
    return Attention(
        call.num_heads,
        call.num_kv_heads,
        call.head_dim,
        scale=_scale(call),
        v_head_dim=call.v_head_dim,
        window=_window(call, max_model_len),
        softcap=options.get("softcap"),
        sinks=sinks,
        layer_index=index,
    )


def _scale(call: AttentionCall) -> float:
    scale = call.options.get("scaling")
    return float(call.head_dim**-0.5 if scale is None else scale)


def _window(call: AttentionCall, max_model_len: int) -> int | None:
    """Tokens a query sees, itself included; None: all. If there is a mask, it counts, not the keyword argument."""
    rule = call.mask
    if rule is None:
        window = call.options.get("sliding_window")
        rule = MaskRule("window", int(window)) if window else MaskRule("full")
    if rule.kind == "other":
        raise PagingError("it builds its own attention mask")
    if rule.kind == "full" or rule.size >= max_model_len:
        return None
    if rule.kind == "chunk":
        raise PagingError(f"it attends within chunks of {rule.size} tokens")
    return rule.size
