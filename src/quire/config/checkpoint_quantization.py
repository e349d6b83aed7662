"""How a checkpoint stores its weights: the scheme of each layer, found by name.

Knows names, numbers and patterns. Does not know config.json (`quantization_config.py`), torch or tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from quire.config.name_patterns import NamePatterns

MATCH_SECONDS = 30.0
"""Processor time for all patterns of a checkpoint and all layers."""

BLOCKS = {
    **{kind: kind for kind in ("Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "Q4_1", "Q5_0", "Q5_1")},
    "Q2_K": "Q5_0",
    **dict.fromkeys(("Q3_K", "IQ4_NL", "IQ4_XS", "MXFP4", "IQ3_XXS", "IQ3_S"), "Q4_1"),
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ1_S", "IQ1_M"), "Q4_1"),
    **dict.fromkeys(("TQ1_0", "TQ2_0", "Q1_0"), "Q4_0"),
}
"""Types of GGUF tensors that the CPU kernels multiply (`quantization/gguf_blocks.py`), and a type that takes as much memory in a
file as they do in the kernels' order: fewer than 4 bits are stored as 4."""

CODED = {"mxfp4": 0.5 + 5 / 32, "mxfp4-experts": 0.5 + 5 / 32, "bnb-4bit": 0.5 + 5 / 64}
"""Readers of weights whose codes the CPU kernels multiply -> bytes of a weight (`quantization/codebooks.py`)."""


@dataclass(frozen=True, slots=True)
class QuantizationScheme:
    """How a checkpoint stores the weight of one linear layer.

    `kind`: gptq, awq, ct-packed, ct-int, float, or decoded: `reader` decodes it to floats as it is read. `group`: number
    of inputs that share a scale, -1: all of them. `strategy`: tensor, channel, block or group. `ordered`: a group's
    inputs are not adjacent; tensor g_idx gives each input's group. `reader`: what reads its tensors from the files
    (`quantization/dequantize_on_load.py`); "": they are stored as `kind` says.
    """

    kind: str
    bits: int
    strategy: str = "group"
    group: int = -1
    block: tuple[int, int] = (128, 128)
    symmetric: bool = True
    ordered: bool = False
    shifted: bool = False  # stored zero points are one too small (the first GPTQ format)
    inverse: bool = False  # the scale is called weight_scale_inv, but it is multiplied as well
    reader: str = ""

    @property
    def is_float(self) -> bool:
        """Whether it stores floats, which `--quantization` may quantize further."""
        return self.kind in ("float", "decoded")

    def describe(self, accelerator: bool = False, online: str | None = None) -> str:
        """Describe it. online: the `--quantization` method applied to 8-bit floats."""
        one = "output channel" if self.strategy in ("group", "channel") else self.strategy
        per = f"groups of {self.group}" if self.group > 0 else f"one scale per {one}"
        if self.kind == "decoded":
            kept = not accelerator and self.reader in CODED
            made = f", quantized to {online}" if online else ", then codes of 4 bits again" * kept
            return f"{self.reader}, decoded to floats{made}"
        if self.kind == "float" and online not in (None, "fp8"):
            return f"8-bit floats with {per}, quantized to {online}"
        if self.kind == "float" and accelerator:
            return f"8-bit floats with {per}; activations 8-bit floats, one scale per token"
        if self.kind == "ct-int" and accelerator:
            return "int8 with one scale per output channel; activations int8, one scale per token"
        if accelerator:
            return f"{self.bits} bits with {per}; activations are not quantized"
        if self.kind == "float":
            return "8-bit floats, converted to int8 with one scale per output channel (CPUs have no 8-bit float arithmetic)"
        if self.kind == "ct-int":
            return "int8 with one scale per output channel"
        if self.bits == 8:
            return f"8 bits with {per}, converted to int8 with one scale per output channel"
        return f"{self.bits} bits with {per}; activations 8 bits, one scale per token"


@dataclass(frozen=True, slots=True)
class CheckpointQuantization:
    """The quantization that config.json describes.

    `groups`: (targets, scheme). `ignored`: names or patterns of unquantized layers. `only`: if not empty, names or
    patterns of the quantized ones. `changed`: (pattern, scheme or None), which takes precedence over `groups`. `kinds_in_file`: the files'
    headers have the type of each tensor, so there are no schemes. `of_towers`: names are those of towers in a wrapper's checkpoint, else of
    its language model, without the wrapper.

    Raises ConfigError: a pattern is refused when it is read, or takes too long (`config/name_patterns.py`).
    """

    method: str
    groups: tuple[tuple[tuple[str, ...], QuantizationScheme], ...]
    ignored: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    changed: tuple[tuple[str, QuantizationScheme | None], ...] = ()
    head: bool = False
    kinds_in_file: bool = False
    of_towers: bool = False
    _patterns: NamePatterns = field(
        default_factory=lambda: NamePatterns("config.json: quantization_config", MATCH_SECONDS),
        init=False, repr=False, compare=False,
    )  # fmt: skip

    def __post_init__(self) -> None:
        names = [*self.ignored, *self.only]
        names += [target for targets, _ in self.groups for target in targets]
        patterns = [name.removeprefix("re:") for name in names if name.startswith("re:")]
        patterns += [pattern for pattern, _ in self.changed]
        self._patterns.add(patterns)

    def scheme_of(self, name: str) -> QuantizationScheme | None:
        """The scheme of a linear layer, by its name in the checkpoint; None: its weight is not quantized."""
        if name == "lm_head" and not self.head:
            return None
        if any(self._names(pattern, name) for pattern in self.ignored):
            return None
        if self.only and not any(self._names(pattern, name) for pattern in self.only):
            return None
        for pattern, scheme in self.changed:
            if self._matches(pattern, name):
                return scheme
        # A group that names the layer takes precedence over one for every linear.
        for special in (True, False):
            for targets, scheme in self.groups:
                for target in targets:
                    if (target != "Linear") == special and (
                        not special or self._names(target, name)
                    ):
                        return scheme
        return None

    def _names(self, pattern: str, name: str) -> bool:
        """Whether `pattern` matches: `re:` and a regular expression, or consecutive parts of the name."""
        if pattern.startswith("re:"):
            return self._matches(pattern[3:], name)
        return any(f".{pattern}." in f".{spelling}." for spelling in self._spellings(name))

    def _matches(self, pattern: str, name: str) -> bool:
        return any(self._patterns.match(pattern, spelling) for spelling in self._spellings(name))

    def _spellings(self, name: str) -> tuple[str, ...]:
        """The name itself, and its forms in checkpoints of wrapped models."""
        inner = name.removeprefix("model.")
        if self.of_towers:
            return inner, f"model.{inner}"
        return name, f"language_model.{name}", f"model.language_model.{inner}"

    def describe(self, accelerator: bool = False, online: str | None = None) -> str:
        """For the log: the stored format and what loading makes of it."""
        kinds = [scheme.describe(accelerator, online) for scheme in dict.fromkeys(self.schemes())]
        return f"{self.method}, {'; '.join(kinds)}"

    @property
    def is_decoded(self) -> bool:
        """Whether weights are decoded to floats as they are read."""
        return any(scheme.kind == "decoded" for scheme in self.schemes())

    def schemes(self) -> Iterator[QuantizationScheme]:
        yield from (scheme for _, scheme in self.groups)
        yield from (scheme for _, scheme in self.changed if scheme is not None)
