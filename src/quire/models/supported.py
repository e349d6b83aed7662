"""Whether Quire can serve a checkpoint, by its config.json alone: the checks before weights are read.

Knows which models Transformers has, from the names of its folders. Imports neither torch nor Transformers.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.config.engine import Resolved
from quire.errors import ConfigError, Unsupported
from quire.models.pooling.detect import check_pooling
from quire.models.registry import FAMILIES, choose_impl
from quire.models.transformers.modes import (
    PER_REQUEST,
    check_own_cache,
    check_supported,
    check_weights,
    choose_mode,
)
from quire.models.wrapper_config import wrapper_config

REFUSED: dict[str, tuple[str, str]] = FAMILIES["refused"]
TASKS = {
    "ForSequenceClassification": "classify",
    "ForTokenClassification": "token_classify",
    "ForQuestionAnswering": "token_classify",
    "RewardModel": "reward",
    "ForMaskedLM": "embed",
    "ForPreTraining": "embed",
    "Model": "embed",
}
"""End of an architecture's name -> the task that such a checkpoint is made for. The first that fits counts."""


def check_model(resolved: Resolved) -> None:
    """Refuse what neither a native model nor the Transformers backend can run.

    Raises:
        ConfigError: neither has the model; or model_impl requires a native model that does not exist.
        Unsupported: the model generates no text, or a setting does not fit the Transformers backend.
    """
    config, name, options = resolved.hf_config, resolved.architecture, resolved.config.model
    kind = str(wrapper_config(resolved).get("model_type"))
    if kind in REFUSED:
        why, remedy = REFUSED[kind]
        raise Unsupported(f"{kind} ({why})", remedy)
    if resolved.pooling is not None:
        check_pooling(resolved.pooling, name)
    if choose_impl(name, config, options.model_impl)[0] == "native":
        return
    check_supported(config, name)
    own_code = config.get("auto_map") or {}
    if not (options.trust_remote_code and own_code):
        _check_task(name, own_code)
        _check_known(name, str(config.get("model_type", "")), bool(own_code))
    check_weights(bool(resolved.quantization or resolved.stored), name)
    if own_cache(resolved):
        check_own_cache(resolved.dtype, resolved.kv_dtype, name)


def _check_task(name: str, own_code: Mapping[str, Any]) -> None:
    """Raises Unsupported: the name belongs to a model for another task than generating text."""
    if name.endswith("LMHeadModel") or "AutoModelForCausalLM" in own_code:
        return
    for end, task in TASKS.items():
        if name.endswith(end):
            raise Unsupported(
                f"{name} (a model for task={task})", "serve a model that generates text"
            )


def _check_known(name: str, kind: str, has_code: bool) -> None:
    """Raises ConfigError: Transformers has no such model."""
    if known_to_transformers(kind):
        return
    remedy = "upgrade transformers, or serve another model"
    if has_code:
        remedy = "it contains Python code (auto_map in config.json): review it, then pass --trust-remote-code"
    version = importlib.metadata.version("transformers")
    raise ConfigError(
        f"neither Quire nor the installed Transformers {version} supports {name} (model_type={kind!r}); {remedy}"
    )


def known_to_transformers(model_type: str) -> bool:
    """Whether the installed Transformers has this model: reads its folders and tables, without importing it."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return False
    models = Path(spec.origin).parent / "models"
    if not model_type or (models / model_type.replace("-", "_")).is_dir():
        return bool(model_type)
    return any(
        f'"{model_type}"' in file.read_text(encoding="utf-8", errors="replace")
        for file in (models / "auto").glob("*.py")
    )


def own_cache(resolved: Resolved) -> str:
    """Why a model on the Transformers backend needs per-request caches, as far as its config shows; "": it does not."""
    mode, why = choose_mode(
        resolved.hf_config, resolved.max_model_len, resolved.max_num_batched_tokens
    )
    return why if mode == PER_REQUEST else ""
