"""ModelConfig: which model, in which form: names, lengths and number formats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The model and its tokenizer."""

    model: str = "quire-tiny"
    """A local directory, a hub id, or `quire-tiny`, the model that is embedded in the package."""
    runner: str = "auto"
    """auto or generate; pooling comes with its own feature."""
    model_impl: str = "auto"
    """auto, quire (also: vllm, native) or transformers: whose modelling code runs."""
    dtype: str = "auto"
    """auto, float16 (half), bfloat16 or float32 (float)."""
    max_model_len: int | str | None = None
    """Prompt plus output, in tokens; `auto` or -1: the most that fits in memory; unset: the model's own."""
    tokenizer: str | None = None
    """Where the tokenizer is; unset: with the model."""
    tokenizer_mode: str = "auto"
    """auto, hf or slow (transformers' Python tokenizer)."""
    skip_tokenizer_init: bool = False
    """Token ids in, token ids out: no tokenizer is loaded."""
    trust_remote_code: bool = False
    """Run Python code that comes with a checkpoint."""
    revision: str | None = None
    """Branch, tag or commit of the model on the hub."""
    code_revision: str | None = None
    """Revision of the checkpoint's own code."""
    tokenizer_revision: str | None = None
    """Revision of the tokenizer."""
    config_format: str = "auto"
    """auto or hf."""
    hf_overrides: dict[str, Any] | Callable[[Any], Any] = field(default_factory=dict)
    """Values put over the checkpoint's config.json (nested dicts merge), or a function of it."""
    hf_token: str | bool | None = None
    """Token for the hub; True: the one stored by `hf auth login`."""
    quantization: str | None = None
    """int8, int4 or fp8: made so while loading; or the method of a quantized checkpoint; unset: as it says."""
    seed: int = 0
    """Seed of requests that bring none: request i of an engine gets a seed derived from both."""
    served_model_name: list[str] | str | None = None
    """Names under which the server answers; the first is the one in responses and metrics."""
    chat_template: str | None = None
    """A path, or the template itself; unset: the tokenizer's."""
    chat_template_content_format: str = "auto"
    """auto, string or openai: how message content reaches the template."""
    generation_config: str = "auto"
    """auto: defaults from the model's generation_config.json; vllm (or quire): none; or a directory."""
    override_generation_config: dict[str, Any] = field(default_factory=dict)
    """Values put over the generation config, such as {"temperature": 0.5}."""
    max_logprobs: int = 20
    """The most log-probabilities a position may be asked for; -1: no limit."""
    logprobs_mode: str = "raw_logprobs"
    """raw_logprobs, processed_logprobs, raw_logits or processed_logits."""
    logits_processors: list[Any] = field(default_factory=list)
    """Classes, or `module:Class`, added to the logits processors of every row."""
    enable_prompt_embeds: bool = False
    """Accept prompts given as embeddings (comes with a later feature)."""
