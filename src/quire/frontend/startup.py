"""The start of an engine: the checks that `serve`, `LLM`, `complete`, `chat` and `doctor` share, then the tokenizer.

The checks read config.json and the small files beside it, in milliseconds and without torch. They run before the weights
are downloaded or read, and before the engine's process starts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from quire.attention.names import check_attention
from quire.config.engine import EngineConfig, Resolved
from quire.engine.client import EngineClient
from quire.errors import ConfigError
from quire.frontend.chat_template import ChatTemplate
from quire.frontend.jinja_sandbox import check_syntax, compile_template
from quire.frontend.tokenizer import Tokenizer, load
from quire.frontend.untrusted_templates import UntrustedTemplateRenderer
from quire.logging import get_logger
from quire.models.checkpoint_locator import EMBEDDED, check_vocabulary, find_adapter, no_tokenizer
from quire.models.safetensors_header import check_fetched
from quire.models.supported import check_model
from quire.startup_timer import Report, no_report

log = get_logger(__name__)


def check_backend(resolved: Resolved) -> None:
    """Raises ConfigError: there is no such attention backend, or this device does not have it."""
    check_attention(resolved.attention_backend, resolved.device)


def check_tokenizer(resolved: Resolved) -> None:
    """Raises ModelNotFound: the tokenizer's directory has no vocabulary."""
    if not resolved.config.model.skip_tokenizer_init:
        check_vocabulary(resolved.tokenizer_folder)


def check_chat_template(resolved: Resolved) -> None:
    """Raises ConfigError: the configured template is neither a file nor a template, or it does not parse."""
    if (template := resolved.config.model.chat_template) is not None:
        compile_template(ChatTemplate.of_argument(template).source)


def check_adapters(resolved: Resolved) -> None:
    """Raises ModelNotFound: an adapter of the configuration is not there."""
    config = resolved.config
    for one in config.lora.adapters:
        find_adapter(one["path"], config.load, config.model.hf_token)


CHECKS: tuple[Callable[[Resolved], None], ...] = (
    check_model,
    check_backend,
    check_tokenizer,
    check_chat_template,
    check_adapters,
)
"""Each raises a QuireError that names what is wrong and what to do. `doctor` reports the errors of all of them."""


def check_startup(resolved: Resolved) -> None:
    """Raises the error of the first check that fails."""
    for check in CHECKS:
        check(resolved)


def load_tokenizer(resolved: Resolved) -> Tokenizer | None:
    """The tokenizer with its chat template; None: skip_tokenizer_init.

    Raises:
        ModelNotFound: there is no tokenizer, or its vocabulary is empty.
        ConfigError: a file of it is damaged.
    """
    options = resolved.config.model
    if options.skip_tokenizer_init:
        return None
    folder = resolved.tokenizer_folder
    if (file := Path(folder) / "tokenizer.json").is_file():
        check_fetched(file)
    tokenizer = load(
        folder,
        mode=options.tokenizer_mode,
        trust_remote_code=options.trust_remote_code,
        chat_template=options.chat_template,
    )
    # Transformers makes such a one from nothing
    if len(tokenizer) - len(tokenizer.special_ids) < 2:
        raise no_tokenizer(folder, "its vocabulary is empty")
    if tokenizer.template is not None:
        if options.chat_template is None and not Path(folder).is_relative_to(EMBEDDED):
            tokenizer.template.isolated = UntrustedTemplateRenderer()
        try:
            check_syntax(tokenizer.template.source)
        except ConfigError as why:
            log.warning(
                "%s; /v1/chat/completions refuses requests; set one with --chat-template", why
            )
    return tokenizer


def start_engine(
    config: EngineConfig, *, process: bool = False, report: Report = no_report
) -> tuple[EngineClient, Tokenizer | None]:
    """Check a configuration, load its tokenizer, and start its engine: in this process, or in one of its own.

    `report` receives the progress of an engine in this process.

    Raises:
        ConfigError, StartupError: as `engine.build.make_client`, and as the checks.
    """
    from quire.engine.build import make_client
    from quire.engine.resolve import resolve_config

    resolved = resolve_config(config, check_startup)
    if not process and len(resolved.config.parallel.ranks) == 1:
        tokenizer = load_tokenizer(resolved)
        return make_client(resolved, report=report), tokenizer
    client = make_client(resolved, process=True, wait=False)
    try:
        tokenizer = load_tokenizer(resolved)  # while the engine loads
        client.wait_ready()
    except BaseException:
        client.close()
        raise
    return client, tokenizer
