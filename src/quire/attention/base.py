"""Attention backends: the interface, the list of them, and the choice of one for a model.

Knows names and capabilities. Does not know models. Imports a backend only to consider it.

Shape suffixes: T tokens of this step, H query heads, K key/value heads, D head size (of values: E).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from quire.attention.kv_quantization import Part, parts
from quire.attention.names import BACKENDS
from quire.errors import ConfigError
from quire.forward_context import ForwardBatch
from quire.kvcache.specs import ELEMENTS, CacheSpec, CrossAttentionSpec, WindowSpec
from quire.logging import get_logger

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionSpec:
    """What a backend computes for one layer: attention of this step's tokens over the contexts of their rows.

    Args:
        head_dim: size of a query and a key; v_head_dim: of a value.
        scale: factor of q·k before the softmax.
        window: a token attends to itself and the window - 1 tokens before it; None: to all before it.
        softcap: scores become softcap * tanh(score / softcap).
        sinks: [H], one score per head that enters the softmax without a value.
        cache: the tensors that the backend's `cache_parts` describes; None until they are allocated.
        causal: False: a token attends to all tokens of its row, also to later ones. The row's prompt must be one step.
        latent: a value is the first v_head_dim features of its key, so the cache has keys only (MLA).
        max_encoder_len: the context of a row is its encoder's states, this many at most; None: its tokens.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    cache: Any = None
    causal: bool = True
    latent: bool = False
    max_encoder_len: int | None = None

    def cache_spec(self, dtype: str) -> CacheSpec:
        """The KV cache of this layer; dtype: name of the element type (kvcache/specs.py)."""
        v_head_dim = 0 if self.latent else self.v_head_dim
        sizes = (self.num_kv_heads, self.head_dim, v_head_dim, dtype)
        if self.max_encoder_len is not None:
            return CrossAttentionSpec(*sizes, max_encoder_len=self.max_encoder_len)
        return CacheSpec(*sizes) if self.window is None else WindowSpec(*sizes, window=self.window)


class QKNormRope(NamedTuple):
    """The norm and rotation that a backend applies to queries and keys."""

    interleaved: bool  # rotates pairs of adjacent features
    q_weight_D: Tensor | None = None  # weights of the RMS norms; None: no norms
    k_weight_D: Tensor | None = None
    eps: float = 0.0
    plus_one: bool = False


@dataclass(frozen=True, slots=True)
class Needs:
    """What a model and its configuration need from a backend: the union over the model's layers."""

    device: str  # "cpu", "cuda"
    dtype: str  # of queries: "float32", "bfloat16", "float16"
    kv_dtype: str = "auto"
    head_dims: frozenset[int] = frozenset()
    differing_values: bool = False  # some layer's v_head_dim is not its head_dim
    windows: bool = False
    softcap: bool = False
    sinks: bool = False
    non_causal: bool = False
    latent: bool = False
    block_size: int = 64

    @staticmethod
    def of(
        specs: Iterable[AttentionSpec], *, device: str, dtype: str, kv_dtype: str, block_size: int
    ) -> Needs:
        found = list(specs)
        return Needs(
            device=device,
            dtype=dtype,
            kv_dtype=kv_dtype,
            head_dims=frozenset(spec.head_dim for spec in found),
            differing_values=any(spec.v_head_dim != spec.head_dim for spec in found),
            windows=any(spec.window is not None for spec in found),
            softcap=any(spec.softcap is not None for spec in found),
            sinks=any(spec.sinks is not None for spec in found),
            non_causal=not all(spec.causal or spec.max_encoder_len for spec in found),
            latent=any(spec.latent for spec in found),
            block_size=block_size,
        )


FEATURES = {
    "differing_values": "values whose size differs from keys",
    "windows": "windows",
    "softcap": "softcap",
    "sinks": "sinks",
    "non_causal": "attention to later tokens",
    "latent": "a cache without values (MLA)",
}
"""Fields of `Needs` and `Capabilities`, in words."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do, as data, so that an error can list what it lacks."""

    devices: frozenset[str] | None  # None: any
    dtypes: frozenset[str]
    head_dims: Sequence[int] | None = None  # None: any
    block_sizes: Sequence[int] | None = None  # None: any
    kv_dtypes: frozenset[str] = frozenset({"auto"})
    differing_values: bool = False
    windows: bool = False
    softcap: bool = False
    sinks: bool = False
    non_causal: bool = False
    latent: bool = False
    graphs: bool = False

    def lacking(self, needs: Needs) -> list[str]:
        """The unmet needs, in words; empty: the backend can serve the model."""
        out = []
        if self.devices is not None and needs.device not in self.devices:
            out.append(f"device {needs.device}")
        if needs.dtype not in self.dtypes:
            out.append(f"dtype {needs.dtype}")
        if needs.kv_dtype not in self.kv_dtypes:
            out.append(f"KV cache of {needs.kv_dtype}")
        elif needs.latent and needs.kv_dtype in ELEMENTS and ELEMENTS[needs.kv_dtype].beside:
            out.append(f"KV cache of {needs.kv_dtype} without values (MLA)")
        if self.head_dims is not None:
            out += [f"head size {d}" for d in sorted(needs.head_dims) if d not in self.head_dims]
        if self.block_sizes is not None and needs.block_size not in self.block_sizes:
            out.append(f"blocks of {needs.block_size}")
        out += [
            words
            for name, words in FEATURES.items()
            if getattr(needs, name) and not getattr(self, name)
        ]
        return out


class AttentionBackend(Protocol):
    """One implementation of attention. State that belongs to a step is in what `plan` returns."""

    can: Capabilities

    def cache_parts(self, spec: CacheSpec, num_blocks: int, block_size: int) -> tuple[Part, ...]:
        """The tensors of a layer's cache: keys, values, then their scales if the cache is quantized."""
        return parts(spec, num_blocks, block_size)

    def plan(self, batch: ForwardBatch, kv_group: int) -> Any:
        """Make the metadata that all layers of a KV group share; called once per step and group."""
        ...

    def attend(
        self,
        spec: AttentionSpec,
        q_THD: Tensor,
        k_TKD: Tensor | None,
        v_TKE: Tensor | None,
        meta: Any,
    ) -> Tensor:
        """Write k and v to their slots in `spec.cache`; return o_THE for this step's tokens.

        None: another layer has written them, to the same cache.
        """
        ...


def load_backend(name: str) -> AttentionBackend:
    """Raises ConfigError: the name is unknown, or the backend cannot be loaded on this machine."""
    target = BACKENDS.get(name.upper())
    if target is None:
        raise ConfigError(
            f"attention backend {name!r} is unknown; choose from {', '.join(BACKENDS)}"
        )
    module, _, attribute = target.partition(":")
    try:
        backend: AttentionBackend = getattr(importlib.import_module(module), attribute)()
    except (ImportError, OSError) as error:
        raise ConfigError(f"attention backend {name} cannot be loaded: {error}") from error
    return backend


def choose_backend(
    requested: str | None, preference: Sequence[str], needs: Needs
) -> tuple[str, AttentionBackend]:
    """The requested backend, or the first of the platform's preference that can serve the model.

    Raises:
        ConfigError: the requested backend cannot serve the model, or none can; the message gives the reason for each.
    """
    passed: list[str] = []
    for name in [requested] if requested and requested != "auto" else preference:
        try:
            backend = load_backend(name)
        except ConfigError as error:
            passed.append(str(error))
            continue
        lacking = backend.can.lacking(needs)
        if not lacking:
            log.info("attention: %s%s", name, f" ({'; '.join(passed)})" if passed else "")
            return name, backend
        passed.append(f"{name} lacks {', '.join(lacking)}")
    raise ConfigError(f"no attention backend can serve this model: {'; '.join(passed)}")
