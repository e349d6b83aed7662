"""Public names of vLLM that Quire does not support yet: they can be imported, but raise an error when used.

A program often imports more than it uses, so the import itself must not fail. Knows names and remedies only; the table
`vllm_names.toml` says which feature a name needs.
"""

from __future__ import annotations

from typing import Any, NoReturn

from quire.compat.vllm_shim import vllm_modules
from quire.config import unsupported
from quire.config.unsupported import Feature, refuse

FEATURES: dict[str, Feature] = {
    "ANSWERS": ("vLLM's classes of answers", "use openai-python's, such as openai.types.chat.ChatCompletion"),
    "CONFIG_OBJECTS": ("a configuration object of vLLM", "use EngineArgs(...).create_engine_config()"),
    "INTERNALS": ("a part of vLLM's model code", "use ModelRegistry, or the options load_format and quantization"),
    "GROUPS": ("vLLM's groups of devices", "use torch.distributed"),
    "OWN_PROCESSORS": ("vLLM's built-in logits processor", "set min_tokens, logit_bias or min_p in SamplingParams"),
    "SERVER_PARTS": ("a part of vLLM's HTTP server", "use run_server(args), or quire serve"),
    "SNAPSHOT": ("metrics of the whole process", "use LLM.get_metrics()"),
    "STAT_LOGGERS": ("loggers of statistics", "read /metrics, or LLM.get_metrics()"),
}  # fmt: skip
"""What the table calls later, besides the constants of `quire.config.unsupported`."""


def feature_of(name: str) -> Feature | None:
    """The feature that a name of the table needs; None: no such name."""
    needed = {
        key for row in vllm_modules().values() for n, key in row.features.items() if n == name
    }
    key = next(iter(needed), None)
    return FEATURES.get(key) or getattr(unsupported, key) if key is not None else None


class _Later(type):
    """Makes access to class attributes fail with the same message as creating an object."""

    feature: Feature

    def __getattr__(cls, name: str) -> NoReturn:
        feature, remedy = type.__getattribute__(cls, "feature")
        raise AttributeError(
            f"{cls.__name__}.{name}: {cls.__name__} ({feature}) is not supported yet: {remedy}"
        )

    def __call__(cls, *values: Any, **keywords: Any) -> NoReturn:
        refuse(cls.__name__, type.__getattribute__(cls, "feature"))


def initialize_ray_cluster(*values: Any, **keywords: Any) -> NoReturn:
    """Raises Unsupported: the engine does this by itself."""
    refuse(
        "initialize_ray_cluster",
        (
            "starting Ray by hand",
            'pass distributed_executor_backend="ray": the engine connects to Ray',
        ),
    )


def __getattr__(name: str) -> Any:
    """Make a class on first access."""
    if (feature := feature_of(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    words = {"__doc__": f"Not supported yet: {feature[0]}.", "__module__": __name__}
    made = _Later(name, (), {**words, "feature": feature})
    globals()[name] = made
    return made
