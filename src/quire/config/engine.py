"""EngineConfig: all sections, made from flat keywords. Resolved: the same without any "auto".

`LLM(max_num_seqs=4)` and `--max-num-seqs 4` both become `EngineConfig.from_keywords(max_num_seqs=4)`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

from msgspec.structs import asdict

from quire.config.cache import KV_DTYPES, CacheConfig
from quire.config.checkpoint_quantization import CheckpointQuantization
from quire.config.load import LoadConfig
from quire.config.lora import LoraConfig
from quire.config.media import MediaConfig
from quire.config.model import ModelConfig
from quire.config.observe import ObserveConfig
from quire.config.parallel.parallel_config import ParallelConfig
from quire.config.pooling import PoolingModel
from quire.config.scheduler import SchedulerConfig
from quire.config.server import ServerConfig
from quire.config.speculation import DraftModel, SpeculationConfig, SpeculativeOptions
from quire.config.structured import StructuredConfig

CHECKPOINT_TOKENS = 64
"""The fewest tokens between two checkpoints of recurrent states, unless mamba_block_size says otherwise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """The configuration as the user gave it."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    load: LoadConfig = field(default_factory=LoadConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    structured: StructuredConfig = field(default_factory=StructuredConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    media: MediaConfig = field(default_factory=MediaConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    server: ServerConfig = field(default_factory=ServerConfig)

    @classmethod
    def from_keywords(cls, **keywords: Any) -> EngineConfig:
        """Flat keywords -> sections.

        Raises:
            TypeError: a keyword that no section has (old names are translated before: `from_keywords.py`).
        """
        sections: dict[str, Any] = {}
        for section in fields(cls):
            kind: Any = section.default_factory
            own = {f.name for f in fields(kind)}
            mine = {name: keywords.pop(name) for name in list(keywords) if name in own}
            sections[section.name] = kind(**mine)
        if keywords:
            raise TypeError(f"unknown keyword: {', '.join(sorted(keywords))}")
        return cls(**sections)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """One model that a worker loads. A worker has the main model, and others if features need them."""

    path: str
    """Local directory of the checkpoint."""
    hf_config: dict[str, Any]
    """config.json after overrides; if a wrapper nests the text model, only the text model's part."""
    architecture: str
    dtype: str
    """float32, bfloat16 or float16."""
    max_model_len: int
    max_step_tokens: int
    quantization: str | None
    """The quantization to apply to unquantized weights while loading; None: weights stay as the checkpoint has them."""
    options: ModelConfig
    load: LoadConfig
    stored: CheckpointQuantization | None = None
    """How the checkpoint's weights are quantized; None: they are not."""
    pooling: PoolingModel | None = None
    """What it computes in place of logits; None: it generates."""
    is_split: bool = True
    """Whether the ranks that split the main model split this one too; else each has all of it."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Where ranks have its experts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """The configuration that engine and worker are built from: no "auto" left, conflicts checked (`resolve.py`)."""

    config: EngineConfig
    path: str
    """Local directory of the checkpoint."""
    hf_config: dict[str, Any]
    """config.json after overrides; if a wrapper nests the text model, only the text model's part."""
    architecture: str
    """The name in the registry; config.json's name may differ where the model pools (`PoolingModel.architecture`)."""
    dtype: str
    """float32, bfloat16 or float16."""
    device: str
    """cpu, cuda."""
    max_model_len: int
    """An upper bound; for `auto`, the memory plan decides (worker/memory_plan.py)."""
    auto_max_model_len: bool
    """The memory plan may lower max_model_len to what fits."""
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    chunked_prefill: bool
    prefix_caching: bool
    depth: int
    executor: str
    """uni, mp, ray or external_launcher."""
    attention_backend: str | None = None
    """The requested backend without aliases (`attention/base.py` finds it); None: the platform's first that fits."""
    quantization: str | None = None
    """The quantization to apply to unquantized weights while loading; None: weights stay as the checkpoint has them."""
    stored: CheckpointQuantization | None = None
    """How the checkpoint's weights are quantized; None: they are not."""
    tokenizer_path: str | None = None
    """Local directory of the tokenizer; None: the checkpoint's directory."""

    pooling: PoolingModel | None = None
    """What the model computes in place of tokens; None: it generates."""
    speculation: SpeculativeOptions | None = None
    """`speculative_config`; None: nothing is speculated."""
    draft: DraftModel | None = None
    """The checkpoint of its drafter, if that has one."""
    experts_folder: str = ""
    """Where engines that share experts have their sockets (parallel/expert_sockets.py); empty: each has all experts."""

    @property
    def tokenizer_folder(self) -> str:
        return self.tokenizer_path or self.path

    @property
    def spec(self) -> ModelSpec:
        """The main model."""
        return ModelSpec(
            path=self.path,
            hf_config=self.hf_config,
            architecture=self.architecture,
            dtype=self.dtype,
            max_model_len=self.max_model_len,
            max_step_tokens=self.max_num_batched_tokens,
            quantization=self.quantization,
            stored=self.stored,
            options=self.config.model,
            load=self.config.load,
            pooling=self.pooling,
            parallel=self.config.parallel,
        )

    @property
    def num_drafts(self) -> int:
        """The most draft tokens of a request in a step; 0: nothing is speculated."""
        return 0 if self.speculation is None else self.speculation.num_speculative_tokens

    @property
    def draft_spec(self) -> ModelSpec | None:
        """The drafter's model."""
        if (draft := self.draft) is None:
            return None
        return replace(
            self.spec,
            **asdict(draft),
            pooling=None,
            is_split=self.speculation is None or self.speculation.draft_tensor_parallel_size != 1,
            parallel=ParallelConfig(),
        )

    @property
    def caches_states(self) -> bool:
        """Whether a model with recurrent states may cache prefixes: a step must be able to end within a prompt."""
        chosen = self.config.cache.mamba_cache_mode != "none"
        return chosen and self.prefix_caching and self.chunked_prefill

    @property
    def checkpoint_boundary(self) -> int:
        """Recurrent states are copied at multiples of this number of tokens."""
        chosen = self.config.cache.mamba_block_size
        return chosen or -(-CHECKPOINT_TOKENS // self.block_size) * self.block_size

    @property
    def checkpoint_interval(self) -> int:
        """And within a prompt at multiples of this number of tokens; 0: only at its end, and where prompts part."""
        cache, boundary = self.config.cache, self.checkpoint_boundary
        if cache.mamba_cache_mode == "all":
            return boundary
        if (chosen := cache.prefix_cache_retention_interval) is None:
            return max(self.max_num_batched_tokens // boundary, 1) * boundary
        return -(-chosen // boundary) * boundary

    @property
    def kv_dtype(self) -> str:
        """Format of the cached keys and values: a name of kvcache/specs.py."""
        return self.kv_dtype_for(self.dtype)

    def kv_dtype_for(self, dtype: str) -> str:
        """As `kv_dtype`, of a model that computes in `dtype`."""
        requested = self.config.cache.kv_cache_dtype
        return KV_DTYPES.get(requested, requested) if requested != "auto" else dtype
