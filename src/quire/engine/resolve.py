"""Resolves a configuration: finds the checkpoint and its tokenizer, reads config.json, and settles each "auto".

Knows configurations and checkpoints. Loads no torch, and starts nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from quire.config.engine import EngineConfig, Resolved
from quire.config.resolve import resolve
from quire.config.speculation import speculative_options
from quire.config.validate import check_options
from quire.kvstore.redis_link import check_url
from quire.models.checkpoint_files import stored_tensors
from quire.models.checkpoint_locator import Fetch, find, locate_tokenizer
from quire.models.draft_model import with_drafter, with_verifier
from quire.models.hf_config import read_config
from quire.models.own_adapter import with_own_adapter
from quire.models.pooling.detect import adapted, base_architecture, read_pooling
from quire.platforms.detect import facts
from quire.plugins import load_plugins


def resolve_config(
    config: EngineConfig, check: Callable[[Resolved], None] = lambda resolved: None
) -> Resolved:
    """Find the checkpoint, read its config.json, resolve every "auto", `check` the result; then fetch the weights.

    Raises:
        QuireError: the configuration cannot be served, or the weights are not complete.
    """
    resolved, fetch_weights = resolve_without_weights(config)
    check(resolved)
    fetch_weights()
    stored_tensors(resolved.path, resolved.hf_config, config.load.load_format)
    return resolved


def resolve_without_weights(config: EngineConfig) -> tuple[Resolved, Fetch]:
    """As `resolve_config`; the second value fetches the weights."""
    check_options(config)
    if config.cache.kv_remote_url:
        check_url(config.cache.kv_remote_url)
    options = speculative_options(config.speculation.speculative_config)
    load_plugins()
    path, fetch = find(config.model, config.load)
    hf_config = read_config(path, config.model.hf_overrides)
    if (served := with_verifier(config, hf_config)) is not None:
        return resolve_without_weights(served)
    tokenizer = None
    if not config.model.skip_tokenizer_init:
        tokenizer = locate_tokenizer(path, config.model, config.load)
    pooling = read_pooling(config, path, hf_config, tokenizer)
    hf_config = adapted(hf_config, pooling)
    base = "" if pooling is None else base_architecture(str(hf_config["architectures"][0]))
    resolved = resolve(config, path, hf_config, facts(), pooling=pooling, architecture=base)
    resolved = with_own_adapter(replace(resolved, tokenizer_path=tokenizer))
    resolved, fetch_drafter = with_drafter(resolved, options)
    return resolved, lambda: (fetch(), fetch_drafter())
