"""A checkpoint's generation config: its default sampling parameters and end-of-text tokens.

Knows generation_config.json, config.json and their fields. Does not know requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.config.model import ModelConfig
from quire.errors import ConfigError
from quire.logging import get_logger
from quire.models.json_files import read_object
from quire.protocol.sampling_params import SamplingParams

log = get_logger(__name__)

# field of generation_config.json -> field of SamplingParams
NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
NONE_OF_IT = ("vllm", "quire")


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """`sampling`: keywords of SamplingParams. `eos_token_ids`: from the config files, not from the tokenizer."""

    sampling: dict[str, Any] = field(default_factory=dict)
    eos_token_ids: tuple[int, ...] = ()

    def params(self, **fields: Any) -> SamplingParams:
        """SamplingParams of the given values, then these defaults, then its own. None means not given."""
        return SamplingParams(
            **{**self.sampling, **{k: v for k, v in fields.items() if v is not None}}
        )

    def max_tokens(self, requested: int | None) -> int | None:
        """`requested`, at most the file's max_new_tokens, as servers take it. Logs the first time that the cap applies."""
        cap = self.sampling.get("max_tokens")
        if cap is None or (requested is not None and requested <= cap):
            return requested
        if requested is not None:
            log.warning_once(
                "generation_config of the model limits outputs to %d tokens, even if a request sets a larger max_tokens;"
                " --generation-config vllm removes the limit",
                int(cap),
            )
        return int(cap)


def generation_defaults(
    path: str | Path, options: ModelConfig, hf_config: dict[str, Any]
) -> GenerationDefaults:
    """Read the defaults of the checkpoint at `path`.

    `asked.generation_config`: auto (the checkpoint's file), vllm or quire (use only its end-of-text tokens), or a
    directory. `asked.override_generation_config` overrides single fields.

    Raises:
        ConfigError: a file is damaged, there is no such directory, or SamplingParams rejects a default.
    """
    source = options.generation_config
    folder = Path(path) if source in ("auto", *NONE_OF_IT) else Path(source)
    if not folder.is_dir():
        raise ConfigError(
            f"generation_config={source!r} is not a directory; use auto, vllm, or a directory with"
            " generation_config.json"
        )
    file = read_object(folder / "generation_config.json")
    ends = _ids(file.get("eos_token_id"))
    if not ends:
        ends = _ids(hf_config.get("eos_token_id"))
    if source in NONE_OF_IT:
        file = {}
    file = {**file, **options.override_generation_config}
    sampling = {field: file[name] for name, field in NAMES.items() if file.get(name) is not None}
    if "max_tokens" in options.override_generation_config:
        sampling["max_tokens"] = options.override_generation_config["max_tokens"]
    try:
        SamplingParams(**sampling)
    except ValueError as error:
        raise ConfigError(
            f"the default sampling parameters from generation_config are not valid: {error}; use"
            " generation_config='vllm' to ignore them, or override_generation_config to change them"
        ) from error
    if sampling:
        log.info("default sampling parameters from generation_config: %s", sampling)
    return GenerationDefaults(sampling, ends)


def _ids(value: Any) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [value]
    return tuple(item for item in ids if isinstance(item, int) and not isinstance(item, bool))
