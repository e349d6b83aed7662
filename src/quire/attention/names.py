"""The attention backends by name: which there are, and which of them a device has. Does not import torch."""

from __future__ import annotations

from quire.errors import ConfigError
from quire.platforms.detect import ATTENTION

BACKENDS: dict[str, str] = {
    "TORCH_SDPA": "quire.attention.reference:ReferenceAttention",
    "CPU_ATTN": "quire.attention.cpu:CpuAttention",
    "TRITON_ATTN": "quire.attention.triton:TritonAttention",
    "FLASH_ATTN": "quire.attention.flash:FlashAttention",
    "FLASHINFER": "quire.attention.flashinfer:FlashInfer",
}
"""Name -> "module:Class". A new backend adds one file and one line here."""


def check_attention(name: str | None, device: str) -> None:
    """Raises ConfigError: there is no such backend, or this device does not have it. A plug-in's may be for any device."""
    own = {each for names in ATTENTION.values() for each in names}
    if name is None or name in ATTENTION.get(device, own) or (name in BACKENDS and name not in own):
        return
    why = f"this backend does not run on {device}" if name in own else "unknown"
    known = [*ATTENTION.get(device, own), *(each for each in BACKENDS if each not in own)]
    raise ConfigError(
        f"attention_backend={name}: {why}; choose from {', '.join(known)}, or leave it out"
    )
