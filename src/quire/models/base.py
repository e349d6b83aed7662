"""The interface of every model, and the model that native families share: a decoder and its LM head.

Does not know caches, batches or files. A family is a subclass that builds its layers (`layer`), and sets other differences
as class attributes.

Shape suffixes: T tokens of this step, S positions that need logits, D features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from quire.errors import Unsupported
from quire.layers.attention import Attention
from quire.layers.decoder import Decoder, ModelParts
from quire.layers.embedding import Embedding, Head
from quire.layers.lora import AdaptedEncoder, AdapterTable, Place, places_of
from quire.layers.native_parts import replaces
from quire.layers.norm import Norm, RMSNorm
from quire.layers.state import StateLayer
from quire.models.hf_config import TextConfig
from quire.parallel.stages import current_stage

if TYPE_CHECKING:
    from quire.protocol.plan import StepPlan


class LanguageModel(nn.Module):
    """What the worker and the engine require of a model, native or through Transformers."""

    description = "native"
    """One sentence for the log: how the model runs, and which features are off."""

    capturable = True
    """Whether its steps may be captured in graphs."""
    adapters: AdapterTable | None = None
    """The loaded LoRA adapters; None: the server takes none."""
    encoders: Sequence[AdaptedEncoder] = ()
    """The towers that encode pictures and sound for this model; LoRA adapters may change them."""
    movable = True
    """Whether its weights may be moved to another device and back."""

    fast_states: Mapping[int, Tensor] = {}
    """Hidden states of the last step, if it ran on the fast path and the model records; at least [T, D]."""

    factor_after_lookup: float | None = None
    """What multiplies embeddings, where Transformers' embedding module does not: `embed` includes it, and embeddings that
    users compute with that module lack it. None: nothing."""

    pooler: nn.Module | None
    """What turns pooled hidden states into the outputs of a pooling model (`layers/pooler.py`); the loader sets it."""

    @property
    def per_request(self) -> bool:
        """Whether the model keeps a cache of its own for each row, so that `forget` must be called."""
        return False

    @property
    def supports_prefix_caching(self) -> bool:
        return True

    @property
    def vocab_size(self) -> int:
        raise NotImplementedError

    def embed(self, token_ids_T: Tensor) -> Tensor:
        """embeddings_TD of tokens, as `forward` takes them, in a new tensor: hooks may replace some."""
        raise NotImplementedError

    def forward(self, embeddings_TD: Tensor, positions: Tensor) -> Tensor:
        """hidden_TD, after the last norm. It may overwrite the embeddings.

        Args:
            positions: [T]; or [T, C], if the rotary embedding takes several components (M-RoPE).
        """
        raise NotImplementedError

    def checkpoint_tensors(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The tensors of this model that a tensor of a checkpoint holds, by their names here."""
        yield name, tensor

    def accepts_fast_step(self, plan: StepPlan) -> bool:
        """Whether this plan may run in one native call, in which no module of the model is called."""
        return False

    def record_hidden_states(self, after: Sequence[int]) -> None:
        """Let each forward pass put the residual stream after this many layers into `current_batch().hidden_states`.

        0 gives the embeddings; the number of layers gives the input of the last norm, and one more gives its output. The
        last call counts. Those of a step on the fast path are in `fast_states`.

        Raises:
            Unsupported: the model cannot. ValueError: it has fewer layers.
        """
        raise Unsupported("hidden states of inner layers, of this model", "use another model")

    def logits(self, hidden_SD: Tensor) -> Tensor:
        """logits_SV."""
        raise NotImplementedError

    def attention_layers(self) -> list[Attention]:
        """In the order in which they run; empty if the model keeps caches of its own."""
        raise NotImplementedError

    def state_layers(self) -> list[StateLayer]:
        """The layers with a recurrent state, in the order in which they run."""
        return []

    def adapter_places(self) -> dict[str, Place]:
        """By module name in checkpoints: the weights to which LoRA adapters may be applied."""
        return places_of(self)

    def forget(self, rows: list[int]) -> None:
        """Free what is kept for rows that requests leave or enter."""


def checked_numbers(after: Sequence[int], num_layers: int) -> frozenset[int]:
    """Numbers of layers. Raises ValueError: the model has fewer."""
    if wrong := [number for number in after if not 0 <= number <= num_layers + 1]:
        raise ValueError(f"hidden states after {wrong} layers: the model has {num_layers}")
    return frozenset(after)


class CausalLM(LanguageModel):
    """A decoder and its LM head.

    Args:
        cfg: config.json of the text model.
        max_length: the longest possible request, in tokens.
    """

    decoder_names: ClassVar[Mapping[str, str]] = {}
    """Names of the decoder's parts in checkpoints, where they differ; see `named_layers`."""

    def __init__(self, cfg: TextConfig, max_length: int = 0):
        super().__init__()
        self.cfg = cfg
        stages = current_stage().layout.pipeline
        if stages > 1 and (why := self.why_uncut(cfg)):
            about = f"pipeline_parallel_size={stages} for {type(self).__name__}, where {why}"
            raise Unsupported(about, "use 1")
        self.model: Decoder = self.decoder(cfg, max_length or cfg.max_position_embeddings)
        if self.scales_after_lookup:
            self.factor_after_lookup = self.embedding_scale(cfg)
        self.lm_head: Head | None = None
        if self.model.stage.is_last:
            self.lm_head = self.head(cfg, self.model.embed_tokens if cfg.tie_word_embeddings else None)  # fmt: skip

    decoder_class: type[Decoder] = Decoder

    def decoder(self, cfg: TextConfig, max_length: int) -> Decoder:
        norm, scale = self.norm(cfg.hidden_size), self.embedding_scale(cfg)
        decoder = self.decoder_class(cfg, self.layer, max_length, norm=norm, embedding_scale=scale)
        decoder.checkpoint_names = self.decoder_names
        return decoder

    def norm(self, size: int) -> Norm:
        """A norm of this family."""
        return RMSNorm(size, self.cfg.rms_norm_eps)

    scales_after_lookup = False
    """Whether `embedding_scale` is a `factor_after_lookup`."""

    def embedding_scale(self, cfg: TextConfig) -> float | None:
        """Factor of the embeddings; None: 1."""
        return None

    def why_uncut(self, cfg: TextConfig) -> str:
        """Why stages of a pipeline cannot have a range of the layers each; empty: they can."""
        return ""

    def ignores(self, name: str) -> bool:
        """Whether checkpoints have this tensor, and Transformers does not use it either, as tensors of MTP layers."""
        first, count = self.cfg.num_hidden_layers, self.cfg.get("num_nextn_predict_layers", 0)
        layer = name.removeprefix("model.layers.").partition(".")[0]
        is_numbered = layer.isdigit() and first <= int(layer) < first + count
        return name.startswith("mtp.") or is_numbered

    def head(self, cfg: TextConfig, tied: Embedding | None) -> Head:
        """The LM head; `tied`: the embedding whose table it uses."""
        return Head(cfg.vocab_size, cfg.hidden_size, tied=tied)

    def layer(self, i: int) -> nn.Module:
        """Layer i of this family."""
        raise NotImplementedError

    def embed(self, token_ids_T: Tensor) -> Tensor:
        """embeddings_TD; [T, 0] on a later stage of a pipeline, which receives hidden states."""
        if not self.model.stage.is_first:
            return torch.empty(len(token_ids_T), 0)
        return self.model.embed_tokens(token_ids_T)

    def forward(self, embeddings_TD: Tensor, positions: Tensor) -> Tensor:
        """hidden_TD, after the last norm."""
        return self.model(embeddings_TD, positions)

    def native(self) -> Any:
        """A family with another decoder, or another way from tokens to logits, says nothing."""
        if type(self.model) is not Decoder or replaces(
            self, CausalLM, "embed", "forward", "logits"
        ):
            return None
        return ModelParts(self.model, self.lm_head)

    def accepts_fast_step(self, plan: StepPlan) -> bool:
        """True: the fast path calls no module, and records hidden states."""
        return True

    def record_hidden_states(self, after: Sequence[int]) -> None:
        """See `LanguageModel`."""
        self.model.layers.recorded = checked_numbers(after, len(self.model.layers))

    def logits(self, hidden_SD: Tensor) -> Tensor:
        """logits_SV, in the model's dtype. Raises RuntimeError: a pooling model has no LM head."""
        if self.lm_head is None:
            raise RuntimeError("a pooling model has no LM head")
        return self.lm_head(hidden_SD)

    def attention_layers(self) -> list[Attention]:
        """Those that have a cache, in the order in which they run."""
        found = [module for module in self.modules() if isinstance(module, Attention)]
        return [attention for attention in found if attention.has_cache]

    def state_layers(self) -> list[StateLayer]:
        """Those that have a cache, in the order in which they run."""
        return [module for module in self.modules() if isinstance(module, StateLayer)]

    @property
    def vocab_size(self) -> int:
        return int(self.cfg.vocab_size)

    @property
    def dtype(self) -> torch.dtype:
        table = self.model.embed_tokens
        return next(self.parameters()).dtype if table is None else table.weight.dtype
