"""From keywords to EngineConfig: fields, vLLM's names and old names are all handled.

`engine_config` is the only way from flat keywords, of a program or a command line, to an EngineConfig. It translates
old names (`vllm_flags.py`), fills missing fields from the environment, and converts values to their field's type. Does not
know argv (`flags.py`).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from logging import INFO, WARNING
from typing import Any

from quire import env
from quire.config.api_key_file import plain_keys
from quire.config.engine import EngineConfig
from quire.config.kv_transfer import FIELD as KV_TRANSFER
from quire.config.kv_transfer import swaps, tier_fields, with_swap_space
from quire.config.model import EMBEDDER
from quire.config.options import coerce, options
from quire.config.parallel.data_parallel import from_environment
from quire.config.parallel.nodes import with_engines_by_node
from quire.config.short_names import expanded
from quire.config.unknown_names import Source, UnknownName, spelt, unknown
from quire.config.vllm_flags import OLD, VllmFlag
from quire.errors import ConfigError, Unsupported
from quire.logging import get_logger

logger = get_logger(__name__)

OF_SERVER_BUT_TAKEN = (
    "enable_auto_tool_choice", "tool_call_parser", "reasoning_parser", "reasoning_config",
)  # fmt: skip
"""Fields of the server that LLM(...) also accepts, because messages suggest them."""

REASONING_KEYS = ("reasoning_parser", "reasoning_parser_plugin")
"""Fields of Quire that vLLM's structured_outputs_config has too."""


def engine_config(keywords: Mapping[str, Any], source: Source = "keyword") -> EngineConfig:
    """Flat keywords -> EngineConfig.

    Args:
        keywords: by field name or any old name; None means "not given".
        source: `keyword` for LLM(...) and EngineArgs(...), which refuse fields of the server; `flag` for the
            command line. It also decides how messages spell names.

    Raises:
        UnknownName: a name that no table has (a TypeError, as for any Python function).
        ConfigError: a field refuses its value.
        Unsupported: a feature that is planned for later.
    """
    fields = translate(keywords, source)
    _check_environment(strict=bool(fields.get("fail_on_environ_validation")))
    if source == "keyword":
        _check_server_fields(fields)
    known = options()
    plain_keys(coerce(known["api_key"], fields.get("api_key")), spelt("api_key", source))
    for name, value in (env.fields() | from_environment()).items():
        if name == "api_key" and fields.get(name) is None and source == "flag":
            plain_keys(value, env.spelt("API_KEY"))
        if fields.get(name) is None and not (
            source == "keyword" and known[name].section == "server"
        ):
            fields[name] = value
    if fields.get("runner") == "pooling" and fields.get("model") is None:
        fields["model"] = EMBEDDER
    fields = expanded(fields)
    config = EngineConfig.from_keywords(
        **{name: coerce(known[name], value) for name, value in fields.items()}
    )
    return with_engines_by_node(config)


def translate(keywords: Mapping[str, Any], source: Source = "keyword") -> dict[str, Any]:
    """Old names -> fields, with a warning for each name that was renamed, and one line for all names without effect. The line is
    no warning if all of them have vLLM's default, which a program may write down for another engine.

    A field given under its own name wins over one that an old name fills; hf_overrides are merged.
    """
    known = options()
    fields: dict[str, Any] = {}
    filled: dict[str, Any] = {}
    idle: dict[str, bool] = {}
    for written, value in with_swap_space(keywords).items():
        name = written.replace("-", "_")
        if name == "device_memory_utilization":
            name = "gpu_memory_utilization"
        if name in known:
            fields[name] = value
        elif (row := OLD.get(name)) is not None:
            _merge(filled, _apply(row, value, source))
            if has_no_effect(row, value):
                idle[f"{spelt(name, source)} has no effect: {row.say}"] = is_quiet(row, value)
        else:
            raise UnknownName(unknown(written, source))
    if idle:
        logger.log(INFO if all(idle.values()) else WARNING, "%s", "; ".join(idle))
    if own := fields.get("structured_outputs_config"):
        own = {**coerce(known["structured_outputs_config"], own)}
        parser = {key: own.pop(key) for key in REASONING_KEYS if key in own}
        filled |= {name: value for name, value in parser.items() if value}
        older = filled.get("structured_outputs_config", {})
        fields["structured_outputs_config"] = older | own
    if own := fields.get("reasoning_config"):
        own = {**coerce(known["reasoning_config"], own)}
        if parser := own.pop("reasoning_parser", None):
            filled["reasoning_parser"] = parser
        fields["reasoning_config"] = own
    if own := fields.get("speculative_config"):
        own = coerce(known["speculative_config"], own)
        own = {key.replace("-", "_"): value for key, value in own.items()}
        older = filled.get("speculative_config", {})
        for key in own.keys() & older:
            if own[key] is not None and str(own[key]) != str(older[key]):
                raise ConfigError(
                    f"speculative_config.{key}={own[key]} and the other option for {key}={older[key]} differ: leave one out"
                )
        fields["speculative_config"] = older | own
    if own := fields.get(KV_TRANSFER):
        filled |= tier_fields(
            coerce(known[KV_TRANSFER], own), spelt(KV_TRANSFER, source), swaps(keywords)
        )
    overrides = filled.pop("hf_overrides", None)
    if overrides is not None:
        own = fields.get("hf_overrides") or {}
        if callable(own):
            raise ConfigError(
                f"hf_overrides is a function, so {', '.join(overrides)} cannot be merged into it; set it in the function"
            )
        fields["hf_overrides"] = {**overrides, **coerce(known["hf_overrides"], own)}
    return {
        **filled,
        **{
            name: value for name, value in fields.items() if value is not None or name not in filled
        },
    }


MERGED = frozenset(
    {"hf_overrides", "structured_outputs_config", "speculative_config", "eplb_config"}
)
"""Objects that several old names fill."""


def _merge(filled: dict[str, Any], more: dict[str, Any]) -> None:
    for name, value in more.items():
        if name in MERGED and name in filled:
            filled[name] = {**filled[name], **value}
        else:
            filled[name] = value


def _apply(row: VllmFlag, value: Any, source: Source) -> dict[str, Any]:
    name = spelt(row.name, source)
    if is_quiet(row, value):
        return (
            row.to(value)
            if row.to and row.treatment != "E" and value is not None and value is not False
            else {}
        )
    if row.treatment == "E":
        feature, _, remedy = row.say.partition(": ")
        raise Unsupported(f"{name} ({feature})", remedy)
    if row.treatment == "W" and row.to:
        logger.warning("%s is an old name: %s", name, row.say)
    return row.to(value) if row.to else {}


def has_no_effect(row: VllmFlag, value: Any) -> bool:
    """Was it given, and does it do nothing here?"""
    is_given = value is not None and value is not False and value not in ("", [], {})
    return row.treatment == "W" and row.to is None and is_given


def is_quiet(row: VllmFlag, value: Any) -> bool:
    """Does this value have the same effect as leaving the name out?"""
    if value is None or value in ("", [], {}):
        return True
    if row.kind == "flag" and value is False and row.to is None:
        return True
    return any(
        value == quiet and isinstance(value, str) == isinstance(quiet, str) for quiet in row.quiet
    )


def _check_server_fields(fields: Mapping[str, Any]) -> None:
    for name, value in fields.items():
        option = options()[name]
        if (
            option.section == "server"
            and name not in OF_SERVER_BUT_TAKEN
            and value not in (None, option.default)
        ):
            raise UnknownName(
                f"{name} is an option of the server only: quire serve --{name.replace('_', '-')}"
            )
    if fields.get("otlp_traces_endpoint"):
        logger.warning(
            "otlp_traces_endpoint has no effect here: spans describe HTTP requests, and only quire serve sends them"
        )


def _check_environment(strict: bool) -> None:
    if strangers := env.unknown():
        described = []
        for name in strangers:
            prefix, _, rest = name.partition("_")
            near = difflib.get_close_matches(rest, env.VARIABLES, n=1)
            described.append(f"{name} (did you mean {prefix}_{near[0]}?)" if near else name)
        message = f"unknown environment variables: {', '.join(described)}"
        if strict:
            raise ConfigError(message)
        logger.warning("%s", message)
    for name, row in env.VARIABLES.items():
        value = env.get(name)  # report an invalid value now rather than in the middle of a request
        if row.no_effect and value != row.default:
            logger.warning("%s=%s has no effect: %s", env.spelt(name), env.raw(name), row.no_effect)
