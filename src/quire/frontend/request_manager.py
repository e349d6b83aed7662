"""Request manager: the frontend of one engine. Accepts prompts, tracks running requests, collects their outputs.

Knows a client, a tokenizer, and the running requests. Starts no threads: `accept` and `render` are thread-safe, the
rest must be called from one thread at a time. `api/llm.py` drives it from the caller's thread, `api/async_llm.py`
from an event loop.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from quire.config.reasoning import reasoning_marks
from quire.config.structured import structured_options
from quire.engine.client import EngineClient
from quire.engine.enabled_features import enabled_features
from quire.errors import ValidationError
from quire.frontend import chat, chat_template
from quire.frontend.adapters import AdapterNames
from quire.frontend.generation_config import generation_defaults
from quire.frontend.input_processor import AcceptedRequest, InputProcessor
from quire.frontend.media.content_parts import GivenMedia, copied_parts, find_parts
from quire.frontend.media.errors import refused
from quire.frontend.media.program_items import options_text
from quire.frontend.output_processor import OutputProcessor
from quire.frontend.parsers.model_formats import ModelFormats
from quire.frontend.pooling import inputs as pooling
from quire.frontend.pooling.collector import PoolingCollector
from quire.frontend.prompt_reader import prompt_readers
from quire.frontend.prompts import Prompt, read_prompt
from quire.frontend.startup import load_tokenizer
from quire.frontend.thinking_markers import with_marks
from quire.frontend.tokenizer import Tokenizer
from quire.logging import get_logger
from quire.models.media import why_no_media
from quire.protocol.output import EngineOutput, FinishReason
from quire.protocol.pooling_params import PoolingParams
from quire.protocol.request import RequestParams
from quire.protocol.sampling_params import SamplingParams

log = get_logger(__name__)

NO_TOKENIZER = "pictures and sound need a tokenizer, but skip_tokenizer_init=True is set"
Accepted = AcceptedRequest | pooling.AcceptedPooling
Collector = OutputProcessor | PoolingCollector


class RequestManager:
    """`submit` requests, pass the client's outputs to `process_outputs`, and `take` from the collectors it returns."""

    def __init__(self, client: EngineClient, number: int = 0, tokenizer: Tokenizer | None = None):
        self.client = client
        resolved, ready = client.resolved, client.ready
        options = resolved.config.model
        self.content_format = options.chat_template_content_format
        self.tokenizer = load_tokenizer(resolved) if tokenizer is None else tokenizer
        known = 0 if self.tokenizer is None else len(self.tokenizer)
        marks = reasoning_marks(resolved.config.server.reasoning_config)
        self.inputs = InputProcessor(
            self.tokenizer,
            ready.max_model_len,
            ready.vocab_size or int(resolved.hf_config.get("vocab_size") or known),
            generation_defaults(resolved.path, options, resolved.hf_config),
            options.max_logprobs,
            options.seed,
            number,
            embedding_size=ready.embedding_size,
            structured=structured_options(resolved.config.structured.structured_outputs_config),
            reasoning=lambda: with_marks(self.formats.reasoning, marks),
        )
        self.adapters = AdapterNames(client)
        self.pooling: pooling.PoolingInputs | None = None
        """The inputs of a pooling model; None: the model generates."""
        if ready.pooling is not None:
            name = options.default_prompt_name
            self.pooling = pooling.PoolingInputs(self.inputs, ready.pooling, name, self._completed)  # fmt: skip
        whys = why_no_media(resolved)
        self.inputs.no_media = {kind: why or NO_TOKENIZER for kind, why in whys.items()}
        self.features = enabled_features(resolved)
        self.readers = prompt_readers(self.features, resolved, self.inputs)
        """What features read in prompts, by name of the feature."""
        self._answers = {feature.name: feature.answer for feature in self.features}
        self.logs_requests = False
        """Log a line for each request; the server writes its own."""
        self.packs_logprobs = False
        """Cumulative outputs carry PackedLogprobs: the server's responses may be large."""
        self.live: dict[str, Collector] = {}
        self._children: dict[str, tuple[Collector, int]] = {}
        self._echoes: set[str] = set()
        """Children that ended here and whose finish the engine has not reported yet."""

    @property
    def template_text(self) -> str:
        """The checkpoint's templates, which show how the model writes tool calls and reasoning."""
        if self.tokenizer is None:
            return ""
        texts = [response_template(Path(self.client.resolved.tokenizer_folder))]
        if (template := self.tokenizer.template) is not None:
            texts += [template.source, *template.named.values()]
        return "\n".join(texts)

    @functools.cached_property
    def formats(self) -> ModelFormats:
        """The model's formats of reasoning and tool calls."""
        return ModelFormats.of(
            self.client.resolved.config.server, self.template_text, self.special_texts
        )

    @property
    def special_texts(self) -> list[str]:
        return [] if self.tokenizer is None else self.tokenizer.all_special_tokens

    @property
    def has_chat_template(self) -> bool:
        return self.tokenizer is not None and self.tokenizer.template is not None

    @property
    def template_is_isolated(self) -> bool:
        """Whether another process renders the checkpoint's template, so that `render` waits for it."""
        template = None if self.tokenizer is None else self.tokenizer.template
        return template is not None and template.isolated is not None

    def prepare(self) -> None:
        """Start the processes that the first request would wait for: of the checkpoint's template, and of features."""
        for reader in self.readers.values():
            reader.prepare()
        template = None if self.tokenizer is None else self.tokenizer.template
        if template is not None and template.isolated is not None:
            template.isolated.prepare()

    def need_tokenizer(self) -> Tokenizer:
        """Raises ValidationError: there is no tokenizer, because of skip_tokenizer_init=True."""
        return self.inputs.need_tokenizer()

    # -- in -------------------------------------------------------------------------------------
    def accept(
        self,
        prompt: Any,
        params: RequestParams | None = None,
        *,
        data_parallel_rank: int | None = None,
        **options: Any,
    ) -> Accepted:
        """Validate a request; see `InputProcessor.accept` and `PoolingInputs.accept` for options and errors.

        `data_parallel_rank`: of the engine that must serve it.
        """
        accepted: Accepted
        if isinstance(params, PoolingParams):
            pooled = self.need_pooling("AsyncLLM.encode")
            accepted = pooled.accept(prompt, params, **options)
            self._add_extras(accepted)
        else:
            accepted = self.accept_generation(prompt, params, **options)
        if data_parallel_rank is not None:
            self._check_rank(data_parallel_rank)
            for child in accepted.children:
                child.engine = data_parallel_rank
        return accepted

    def _check_rank(self, rank: int) -> None:
        """Raises ValidationError: this server or program has no such engine."""
        ranks = self.client.resolved.config.parallel.ranks
        if rank not in ranks:
            known = (
                f"the engines {ranks[0]} to {ranks[-1]}"
                if len(ranks) > 1
                else f"the engine {ranks[0]}"
            )
            raise ValidationError(
                f"data_parallel_rank={rank}: requests reach {known} here",
                parameter="data_parallel_rank",
                value=rank,
            )

    def accept_generation(
        self, prompt: Any, params: SamplingParams | None = None, **options: Any
    ) -> AcceptedRequest:
        """Raises ValidationError: the model does not generate; and as `InputProcessor.accept`."""
        self.need_generation("LLM.generate or AsyncLLM.generate")
        given = self._completed(read_prompt(prompt), options.get("tokenization_kwargs"))
        accepted = self.inputs.accept(given, params, **options)
        self._add_extras(accepted)
        return accepted

    def _completed(self, prompt: Prompt, tokenization: Any = None) -> Prompt:
        """The prompt with what features read in it. Blocks.

        Raises:
            ValidationError: an item cannot be used, or no feature reads it.
        """
        for reader in self.readers.values():
            if reader.takes(prompt):
                return reader.read(prompt, tokenization)
        if prompt.items:
            raise self._not_read(prompt.items[0], "multi_modal_data")
        return prompt

    def _not_read(self, item: GivenMedia, where: str = "") -> ValidationError:
        """The error of an item that no feature reads. `where`: a place to name instead of the item's own."""
        return refused(where or item.where, self.inputs.no_media[item.kind])

    def chat_prompt(
        self, messages: Sequence[Any], options: chat.ChatOptions, processing: Any = None
    ) -> Prompt:
        """The prompt of a conversation of a program: its text, or its tokens if it has media. Blocks. `processing`:
        `mm_processor_kwargs`.

        Raises: as `render`; ValidationError: an item cannot be used.
        """
        plain = [chat_template.plain(one) if not isinstance(one, dict) else one for one in messages]
        copied = copied_parts(plain)
        places = find_parts(copied, "messages", local=True, options=options_text(processing))
        if not places:
            return Prompt(self.render(messages, options))
        for reader in self.readers.values():
            found = reader.read_chat(copied, places, options, self.render)
            if found is not None:
                return found
        raise self._not_read(places[0].given)

    def _add_extras(self, accepted: Accepted) -> None:
        """Add the features' extras to the request. Raises ValidationError: a feature cannot serve the request."""
        for feature in self.features:
            if (extra := feature.request_extra(accepted.params)) is not None:
                for child in accepted.children:
                    child.extras[feature.name] = extra
                    child.num_encoder_tokens += feature.num_encoder_tokens(extra)

    def need_pooling(self, what: str) -> pooling.PoolingInputs:
        """Raises ValidationError: `what` needs a pooling model."""
        if self.pooling is None:
            raise pooling.not_pooling(what)
        return self.pooling

    def need_generation(self, what: str) -> None:
        """Raises ValidationError: `what` needs a model that generates; the message names what this model does."""
        if self.pooling is not None:
            raise pooling.not_generating(self.pooling.info, what)
        for reader in self.readers.values():
            reader.check_route(what)

    def render(self, messages: Sequence[Any], options: chat.ChatOptions | None = None) -> str:
        """Render a conversation as prompt text; see `chat.render` for errors."""
        options = options or chat.ChatOptions()
        if options.content_format == "auto":
            options = dataclasses.replace(options, content_format=self.content_format)
        return chat.render(self.inputs.need_tokenizer("messages"), messages, options)

    def submit(self, accepted: Accepted) -> Collector:
        """Register the request and send it to the engine.

        Raises:
            ValidationError: as `register`.
            EngineDeadError: the engine has stopped.
        """
        collector = self.register(accepted)
        try:
            for child in accepted.children:
                self.client.submit(child)
        except BaseException:
            self.forget(collector)
            raise
        return collector

    def register(self, accepted: Accepted) -> Collector:
        """Create the collector of a request's outputs, before its children are sent; `forget` it if one cannot be sent.

        Raises:
            ValidationError: a request with this id is still running.
        """
        if accepted.id in self.live:
            raise ValidationError(
                f"request_id {accepted.id!r} belongs to a running request; choose another",
                parameter="request_id",
                value=accepted.id,
            )
        # If the engine still knows a child's id, or another request's child has it, the engine gets a different one.
        for number in itertools.count(1):
            if not any(c.id in self._echoes or c.id in self._children for c in accepted.children):
                break
            accepted.rename_children(number)
        if self.logs_requests:
            self._log(accepted)
        collector: Collector
        if isinstance(accepted, pooling.AcceptedPooling):
            collector = PoolingCollector(accepted)
        else:
            collector = OutputProcessor(accepted, self.tokenizer, self.packs_logprobs, self._answers)  # fmt: skip
        self.live[accepted.id] = collector
        for index, child in enumerate(accepted.children):
            self._children[child.id] = (collector, index)
        return collector

    # -- out ------------------------------------------------------------------------------------
    def process_outputs(self, outputs: Iterable[EngineOutput]) -> list[Collector]:
        """Collect outputs; returns each changed request once. Forgets finished requests."""
        now = time.time()
        changed: dict[str, Collector] = {}
        finished: dict[FinishReason, list[str]] = {}
        for output in outputs:
            place = self._children.get(output.id)
            if place is None:  # ended here before
                if output.finish is not None:
                    self._echoes.discard(output.id)
                continue
            collector, index = place
            if collector.tap is not None:
                collector.tap(output)
            stopped = collector.add(index, output, now)
            if (reason := collector.children[index].finish) is not None and stopped:
                finished.setdefault(reason, []).append(output.id)
                self._echoes.add(output.id)
            if stopped or output.finish is not None:
                del self._children[output.id]
                if collector.finished:
                    self.forget(collector)
            changed[collector.id] = collector
        for reason, ids in finished.items():
            self.client.abort(ids, reason)
        return list(changed.values())

    def abort(self, ids: Iterable[str]) -> list[Collector]:
        """Abort requests: each ends at once with finish_reason "abort". Ignores unknown ids."""
        collectors = [self.live[id] for id in ids if id in self.live]
        finished = [child for collector in collectors for child in collector.end("abort")]
        self._echoes.update(finished)
        for collector in collectors:
            self.forget(collector)
        if finished:
            self.client.abort(finished)
        return collectors

    def _log(self, accepted: Accepted) -> None:
        max_length = self.client.resolved.config.observe.max_log_len
        text = None if accepted.prompt is None else accepted.prompt[:max_length]
        log.info(
            "Received request %s: prompt: %r, prompt_token_ids: %s, params: %s",
            accepted.id, text, accepted.tokens[:max_length], accepted.params,
        )  # fmt: skip

    def forget(self, collector: Collector) -> None:
        self.live.pop(collector.id, None)
        for child in collector.children:
            self._children.pop(child.id, None)


def response_template(folder: Path) -> str:
    """`response_template` of tokenizer_config.json (the form of outputs), without escapes; "" if there is none."""
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        template = config.get("response_template")
    except (OSError, ValueError, AttributeError):
        return ""
    return "" if template is None else json.dumps(template, ensure_ascii=False).replace("\\", "")
