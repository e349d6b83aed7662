"""Transformers backend: any text model of Transformers, with the interface of native models.

    paged         Quire's attention, with the model's own code for all else; paging, prefix caching and
                  preemption work as for native models
    per request   the model's own cache, one pass per row; slower, for models that also mix tokens elsewhere

The mode is decided at load: first by the config (`modes.py`), then by what the layers pass to attention in
one forward pass (`paged.py`), then by whether the logits agree (`self_check.py`).
A model that fails in both modes is refused.

Knows one forward pass. Does not know blocks, plans, sampling, or any architecture by name.

Shape suffixes: T tokens of this step, S positions that need logits, D hidden size, V vocabulary.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from quire.config.engine import ModelSpec
from quire.errors import Unsupported
from quire.forward_context import ForwardBatch, current_batch, replace_current_batch
from quire.layers.attention import Attention
from quire.layers.lora import Place
from quire.logging import get_logger
from quire.models.base import LanguageModel, checked_numbers
from quire.models.progress import LoadProgress
from quire.models.transformers import load as loading
from quire.models.transformers import paged
from quire.models.transformers import self_check as check
from quire.models.transformers.adapters import places_of
from quire.models.transformers.hidden_states import (
    HiddenStateRecorder,
    adding_states,
    decoder_layers,
)
from quire.models.transformers.modes import PAGED, PER_REQUEST, Mode, check_supported, choose_mode
from quire.models.transformers.parts import (
    drop_towers,
    find_trunk,
    forward_replaced,
    hidden_of,
    like,
    logits_of,
    runner_of,
    vocab_size,
)
from quire.models.transformers.per_request import PerRequestCaches

log = get_logger(__name__)

CACHE_NAMES = ("past_key_values", "cache_params", "cache")
"""What a forward function calls its cache: one of the first two before Transformers 5.24, and in a checkpoint's own code."""


class _OnDevice(Protocol):
    device: torch.device


class TransformersModel(LanguageModel):
    """See the module's docstring. Make one with `build`.

    Attributes:
        mode: "paged" or "per request".
        per_request: True in mode "per request": no attention layers of Quire, and `forget` must be called.
        supports_prefix_caching: False in mode "per request".
        description: one sentence for the log: which mode, why, and which features are off.
    """

    mode: Mode
    capturable = False  # the model's code may read values from the device, which a graph cannot do

    def __init__(self, model: PreTrainedModel, max_model_len: int, step_tokens: int = 0):
        """Wrap a model that has its weights.

        Raises:
            Unsupported: in neither mode do the logits agree with the model's own forward pass.
        """
        super().__init__()
        self.model = model
        self.config = model.config.get_text_config(decoder=True)
        check_supported(self.config.to_dict(), type(model).__name__)
        self._layers = nn.ModuleList()
        self._caches: PerRequestCaches | None = None
        self._recorder: HiddenStateRecorder | None = None
        self._frozen = loading.freeze_rope(model, max_model_len)
        # `python -W error` and a new release of Transformers: a warning of the model's code says nothing about its logits.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._find_parts(model)
            self._choose(max_model_len, step_tokens)

    def _find_parts(self, model: PreTrainedModel) -> None:
        self._trunk, self._output = find_trunk(model)
        self._runner = runner_of(model, self._trunk)
        self._lookup: nn.Module = model.get_input_embeddings()
        self._dropped = drop_towers(model, self._runner)
        names = inspect.signature(self._runner.forward).parameters
        self._cache_name = next((name for name in CACHE_NAMES if name in names), CACHE_NAMES[0])
        takes_any = any(p.kind is p.VAR_KEYWORD for p in names.values())
        self._takes_positions = "position_ids" in names or takes_any

    @classmethod
    def build(
        cls, spec: ModelSpec, platform: _OnDevice, progress: LoadProgress | None = None
    ) -> TransformersModel:
        """Load the checkpoint of `spec` and choose the mode.

        Raises:
            ConfigError: the checkpoint is incomplete, or needs code that is not trusted.
            Unsupported: it has no text model, or one that neither mode can run.
        """
        check_supported(spec.hf_config, spec.architecture)
        model = loading.load(spec, platform.device, progress or LoadProgress())
        with torch.no_grad():
            built = cls(model, spec.max_model_len, spec.max_step_tokens)
        log.info("%s: %s", spec.architecture, built.description)
        return built

    # --------------------------------------------------------------------------------------- LanguageModel

    @property
    def per_request(self) -> bool:
        return self.mode == PER_REQUEST

    @property
    def supports_prefix_caching(self) -> bool:
        return self.mode == PAGED

    @property
    def vocab_size(self) -> int:
        return vocab_size(self.model)

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    def adapter_places(self) -> dict[str, Place]:
        """See `LanguageModel`."""
        return places_of(self.model)

    def attention_layers(self) -> list[Attention]:
        """In the order in which a pass calls them; empty in mode "per request"."""
        return list(self._layers)  # type: ignore[arg-type]

    def embed(self, token_ids_T: Tensor) -> Tensor:
        """embeddings_TD: the model's own lookup, with any scaling that it contains."""
        # Not through `__call__`: hooks on the lookup run once, where the model's own code calls it.
        return self._lookup.forward(token_ids_T[None])[0]

    def forward(self, embeddings_TD: Tensor, positions: Tensor) -> Tensor:
        """Hidden states of the step, [T, D], as the LM head needs them."""
        batch = current_batch()
        recorder = self._recorder
        with (
            self._lookup_gives(embeddings_TD),
            adding_states(self._decoder_layers, batch),
            nullcontext() if recorder is None else recorder.recording(batch),
        ):
            hidden_TD = self._forward(batch, batch.token_ids_T, positions)
        if recorder is not None:
            recorder.record_last(batch, hidden_TD)
        return hidden_TD

    def record_hidden_states(self, after: Sequence[int]) -> None:
        """See `LanguageModel`. The model's decoder layers must be in one list."""
        layers = self._decoder_layers()
        numbers = checked_numbers(after, len(layers))
        self._recorder = HiddenStateRecorder(layers, numbers) if numbers else None

    def _decoder_layers(self) -> nn.ModuleList:
        """Raises Unsupported: they are not in one list."""
        return decoder_layers(self._runner, int(self.config.num_hidden_layers))

    def _forward(self, batch: ForwardBatch, token_ids_T: Tensor, positions_T: Tensor) -> Tensor:
        if self._caches is None:
            return self._run(token_ids_T[None], positions_T[None])[0][0]
        rows = batch.rows_B[: batch.num_rows].tolist()
        parts, start = [], 0
        for row, n, length in zip(rows, batch.query_lens, batch.lengths, strict=True):
            end = start + n
            if n:
                # One token at a time sees one token's extra tensors: all tokens of a row have equal ones.
                one = self._caches.one_by_one and length > n
                with replace_current_batch(
                    batch.of_tokens(slice(start, start + 1 if one else end))
                ):
                    ids_T, places_T = token_ids_T[start:end], positions_T[start:end]
                    parts.append(self._caches.run(row, length - n, ids_T, places_T))
            start = end
        if padding := len(token_ids_T) - start:
            parts.append(parts[0].new_zeros(padding, parts[0].shape[-1]))
        return torch.cat(parts)

    def logits(self, hidden_SD: Tensor) -> Tensor:
        """[S, V]: the LM head, with any scaling or capping that the model's own forward adds."""
        ids_1S = torch.zeros(1, len(hidden_SD), dtype=torch.long, device=hidden_SD.device)
        with self._trunk_gives(hidden_SD[None]):
            return logits_of(self.model(input_ids=ids_1S, use_cache=False))[0]

    def forget(self, rows: list[int]) -> None:
        """Free what is kept for rows that requests leave or enter: caches, in mode "per request"."""
        if self._caches is not None:
            self._caches.forget(rows)

    # --------------------------------------------------------------------------------------- passes

    def _run(self, ids_1T: Tensor, positions_1T: Tensor, **cache: Any) -> tuple[Tensor, Any]:
        if positions_1T.ndim == 3:  # of several components, which Transformers has first
            positions_1T = positions_1T.permute(2, 0, 1)
        places = {"position_ids": positions_1T} if self._takes_positions else {}
        output = self._runner(input_ids=ids_1T, use_cache=bool(cache), **places, **cache)
        return hidden_of(output), output

    def _run_cached(self, ids_1T: Tensor, positions_1T: Tensor, cache: Any) -> tuple[Tensor, Any]:
        hidden_1TD, output = self._run(ids_1T, positions_1T, **{self._cache_name: cache})
        updated = getattr(output, self._cache_name, None)
        return hidden_1TD, cache if updated is None else updated

    def _new_cache(self) -> Any:
        return (
            DynamicCache(config=self.config)
            if self.model._supports_default_dynamic_cache()
            else None
        )

    def _plain(self, ids_N: Tensor) -> Tensor:
        return logits_of(self.model(input_ids=ids_N[None], use_cache=False))[0]

    def _lookup_gives(self, embeddings_TD: Tensor) -> AbstractContextManager[None]:
        """Inside, the model's embedding table gives these rows, in order, whatever the ids; the ids serve other parts."""
        start = 0

        def next_rows(ids: Tensor, *_: Any, **__: Any) -> Tensor:
            nonlocal start
            first, start = start, start + ids.numel()
            return embeddings_TD[first:start].view(*ids.shape, -1)

        return forward_replaced(self._lookup, next_rows)

    def _trunk_gives(self, hidden_1SD: Tensor) -> AbstractContextManager[None]:
        """Inside, the model's forward skips its layers and continues with these hidden states."""
        return forward_replaced(
            self._trunk, lambda *_args, **_kwargs: like(self._output, hidden_1SD)
        )

    # --------------------------------------------------------------------------------------- choice of the mode

    def _choose(self, max_model_len: int, step_tokens: int) -> None:
        mode, reason = choose_mode(self.config.to_dict(), max_model_len, step_tokens)
        if mode == PAGED:
            try:
                self._become_paged(max_model_len)
            except paged.PagingError as error:
                mode, reason = PER_REQUEST, str(error)
        if mode == PER_REQUEST:
            self._become_per_request()
        self.mode = mode
        self.description = self._describe(reason)

    def _describe(self, reason: str) -> str:
        if self.mode == PAGED:
            parts = [f"runs through Transformers, paged: {reason}"]
        else:
            parts = [
                f"runs through Transformers with one cache per request because {reason}",
                "prefix caching, paging and batched decoding are off",
            ]
            if self._caches is not None and self._caches.one_by_one:
                parts.append("only the first chunk of a prompt is computed in one pass")
        if self._dropped:
            parts.append(f"text only: {', '.join(self._dropped)} not kept")
        return "; ".join(parts + self._frozen)

    def _become_paged(self, max_model_len: int) -> None:
        before = self.model.config._attn_implementation
        ids = check.prompts(vocab_size(self.model), self.model.device)
        calls = paged.probe(self.model, self._run)
        layers = paged.attach(calls, max_model_len)
        check.register(paged.HANDLE)
        try:
            with check.checking() as rows:

                def step(pieces: list[tuple[int, int, Tensor]]) -> list[Tensor]:
                    rows.pieces = [(row, start, len(ids_T)) for row, start, ids_T in pieces]
                    return self._paged_step(pieces)

                wrong = self._compare(ids, step, check.CHECK)
            if wrong:
                raise paged.PagingError(wrong)
        except paged.PagingError:
            paged.detach(calls)
            paged.set_attention(self.model, before)
            raise
        paged.set_attention(self.model, paged.ATTENTION)
        self._layers.extend(layers)

    def _paged_step(self, pieces: list[tuple[int, int, Tensor]]) -> list[Tensor]:
        ids_T = torch.cat([ids for _, _, ids in pieces])
        positions_T = torch.cat(
            [torch.arange(start, start + len(ids), device=ids.device) for _, start, ids in pieces]
        )
        try:
            with self._lookup_gives(self.embed(ids_T)):
                hidden_1TD = self._run(ids_T[None], positions_T[None])[0]
            logits_TV = self.logits(hidden_1TD[0])
        except Exception as error:  # model code may fail in any way with an unexpected pass
            raise paged.PagingError(
                f"a paged pass failed in its code ({type(error).__name__}: {error})"
            ) from error
        return list(logits_TV.split([len(ids) for _, _, ids in pieces]))

    def _become_per_request(self) -> None:
        ids = check.prompts(vocab_size(self.model), self.model.device)
        reasons = []
        for one_by_one in (False, True):
            caches = PerRequestCaches(self._run_cached, self._new_cache, one_by_one)
            try:
                wrong = self._compare(ids, functools.partial(self._cached_step, caches), None)
            except Exception as error:  # as above
                wrong = f"a pass with its own cache failed ({type(error).__name__}: {error})"
            if not wrong:
                caches.forget(range(len(ids)))
                self._caches = caches
                return
            reasons.append(wrong)
        raise Unsupported(
            f"{type(self.model).__name__} ({self.config.model_type}) through the Transformers backend "
            f"(with one cache per request {reasons[-1]})",
            "use another checkpoint, or report this with the model's name",
        )

    def _cached_step(
        self, caches: PerRequestCaches, pieces: list[tuple[int, int, Tensor]]
    ) -> list[Tensor]:
        results = []
        for row, start, ids_T in pieces:
            positions_T = torch.arange(start, start + len(ids_T), device=ids_T.device)
            with self._lookup_gives(self.embed(ids_T)):
                hidden_TD = caches.run(row, start, ids_T, positions_T)
            results.append(self.logits(hidden_TD))
        return results

    def _compare(
        self,
        ids: list[Tensor],
        step: Callable[[list[tuple[int, int, Tensor]]], list[Tensor]],
        attention: str | None,
    ) -> str | None:
        """`check.difference`; the model uses `attention` only while `step` runs."""
        before = self.model.config._attn_implementation

        def attended(pieces: list[tuple[int, int, Tensor]]) -> list[Tensor]:
            if attention is None:
                return step(pieces)
            paged.set_attention(self.model, attention)
            try:
                return step(pieces)
            finally:
                paged.set_attention(self.model, before)

        exact = self.model.dtype == torch.float32
        limit = check.EXACT if exact else self._rounding(ids)
        return check.difference(ids, self._plain, attended, limit, spare=not exact)

    def _rounding(self, ids: list[Tensor]) -> float:
        """See `check.rounding`: compares the model's attention with eager attention."""
        before = self.model.config._attn_implementation

        def simply(ids_N: Tensor) -> Tensor:
            paged.set_attention(self.model, "eager")
            try:
                return self._plain(ids_N)
            finally:
                paged.set_attention(self.model, before)

        if before == "eager" or not self.model._can_set_attn_implementation():
            return check.ROUGH
        return check.rounding(ids, self._plain, simply)
