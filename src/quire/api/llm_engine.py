"""LLMEngine: add requests one by one and fetch outputs step by step, as older programs for vLLM do.

LLM is simpler for batches, AsyncLLM for streams. Knows a RequestManager and a client.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Self

from quire.api.lora_calls import LoraCalls
from quire.api.vllm_config_view import EngineFacts
from quire.config.engine import EngineConfig
from quire.engine.client import EngineClient
from quire.frontend.adapters import names_for
from quire.frontend.request_manager import RequestManager
from quire.frontend.startup import start_engine
from quire.frontend.tokenizer import Tokenizer
from quire.protocol.sampling_params import SamplingParams


class LLMEngine(EngineFacts, LoraCalls):
    """An engine in this program; the caller drives its steps. Not thread-safe."""

    def __init__(self, client: EngineClient, tokenizer: Tokenizer | None = None):
        self.client, self.front = client, RequestManager(client, tokenizer=tokenizer)
        self.config = client.resolved.config
        self.front.logs_requests = self.config.observe.enable_log_requests
        self._ended: list[Any] = []
        self._close = weakref.finalize(self, client.close)

    @classmethod
    def from_engine_args(cls, engine_args: Any, **ignored: Any) -> Self:
        """Make one from an EngineArgs. Ignores `usage_context` and `stat_loggers`."""
        return cls.from_config(engine_args.create_engine_config())

    @classmethod
    def from_config(cls, config: EngineConfig) -> Self:
        client, tokenizer = start_engine(config)
        try:
            return cls(client, tokenizer)
        except BaseException:
            client.close()
            raise

    def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams | None = None,
        arrival_time: float | None = None,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        prompt_text: str | None = None,
    ) -> str:
        """Send a request to the engine; returns its id.

        Raises:
            ValidationError: the request is invalid, or a running request has this id.
        """
        (adapter,) = names_for(self.front.adapters, [lora_request])
        accepted = self.front.accept(
            prompt, params, id=request_id, priority=priority, lora_request=lora_request, adapter=adapter,
            tokenization_kwargs=tokenization_kwargs, arrived=arrival_time,
        )  # fmt: skip
        if prompt_text is not None:
            accepted.prompt = accepted.prompt or prompt_text
        self.front.submit(accepted)
        return request_id

    def step(self) -> list[Any]:
        """New outputs, of the kind that each request's `output_kind` selects; [] if no request runs."""
        outputs, self._ended = self._ended, []
        if not outputs and self.front.live:
            changed = self.front.process_outputs(self.client.outputs())
            outputs = [out for one in changed if (out := one.take()) is not None]
        return outputs

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests; the next step returns their last outputs."""
        ids = [request_ids] if isinstance(request_ids, str) else request_ids
        for collector in self.front.abort(ids):
            if (output := collector.take()) is not None:
                self._ended.append(output)

    def has_unfinished_requests(self) -> bool:
        return bool(self.front.live or self._ended)

    def get_num_unfinished_requests(self) -> int:
        return len(self.front.live)

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.front.tokenizer

    def get_tokenizer(self) -> Tokenizer:
        """Raises ValidationError: skip_tokenizer_init=True left the tokenizer out."""
        return self.front.need_tokenizer()

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """As `LLM.reset_prefix_cache`."""
        return bool(self.client.call("reset_prefix_cache", reset_running_requests))

    def shutdown(self) -> None:
        """Stop the engine."""
        self._close()
