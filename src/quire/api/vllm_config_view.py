"""`model_config` and `vllm_config` of an engine: what programs for vLLM read of a running engine's configuration.

Knows the resolved configuration and the message of a successful start. The configuration itself is in `quire.config`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from quire.api.collective_rpc import worker_call
from quire.engine.client import EngineClient


class ModelFacts:
    """The values that the engine uses, and every field of ModelConfig as requested."""

    runner_type = "generate"
    is_multimodal_model = False

    def __init__(self, client: EngineClient):
        self.config = client.resolved.config.model
        ready, hf_config = client.ready, client.resolved.hf_config
        if isinstance(labels := hf_config.get("id2label"), dict):  # JSON has text keys only
            numbered = {int(key) if str(key).isdecimal() else key: labels[key] for key in labels}
            hf_config = {**hf_config, "id2label": numbered}
        self.max_model_len = ready.max_model_len
        self.tokenizer = self.config.tokenizer or self.config.model
        self.architectures = [client.resolved.architecture]
        self.hf_config = self.hf_text_config = SimpleNamespace(**hf_config)
        self._dtype, self._vocab = ready.dtype, ready.vocab_size

    @property
    def dtype(self) -> Any:
        """A torch dtype."""
        import torch  # the engine's process has it; the front end needs it only here

        return getattr(torch, self._dtype)

    def get_vocab_size(self) -> int:
        return self._vocab

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.config, name)


class EngineFacts:
    """Base class of the objects that own an engine's client."""

    client: EngineClient

    @property
    def model_config(self) -> ModelFacts:
        """The model's configuration: the values in use, else those requested."""
        return ModelFacts(self.client)

    @property
    def engine_core(self) -> Any:
        """The calls that programs make on vLLM's engine core."""

        def collective_rpc(method: str, timeout: float | None = None, args: Any = (), kwargs: Any = None) -> Any:  # fmt: skip
            return self.client.call(*worker_call(self.client, method, args, kwargs))

        def save_sharded_state(path: str, pattern: str | None = None, max_size: int | None = None) -> None:  # fmt: skip
            collective_rpc("save_sharded_state", args=[str(path), pattern, max_size])

        return SimpleNamespace(collective_rpc=collective_rpc, save_sharded_state=save_sharded_state)

    @property
    def vllm_config(self) -> Any:
        """The parts of vLLM's configuration object that describe Quire's engine too."""
        ready, resolved = self.client.ready, self.client.resolved
        cache, parallel = resolved.config.cache, resolved.config.parallel
        return SimpleNamespace(
            model_config=self.model_config,
            cache_config=SimpleNamespace(
                block_size=ready.block_size, num_gpu_blocks=ready.num_blocks, cache_dtype=cache.kv_cache_dtype,
                enable_prefix_caching=resolved.prefix_caching, gpu_memory_utilization=cache.gpu_memory_utilization,
            ),
            scheduler_config=SimpleNamespace(
                max_num_seqs=resolved.max_num_seqs, max_num_batched_tokens=resolved.max_num_batched_tokens,
                max_model_len=ready.max_model_len,
            ),
            parallel_config=SimpleNamespace(
                tensor_parallel_size=parallel.tensor_parallel_size,
                pipeline_parallel_size=parallel.pipeline_parallel_size,
                data_parallel_size=parallel.data_parallel_size, world_size=parallel.world_size,
                data_parallel_rank=parallel.data_parallel_rank or 0,
            ),
            speculative_config=resolved.speculation,
            lora_config=resolved.config.lora if resolved.config.lora.enable_lora else None,
        )  # fmt: skip
