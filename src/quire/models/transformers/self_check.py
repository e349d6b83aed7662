"""Self check: does a Transformers model give the same logits in Quire's mode as in its own forward pass?

Every model of the Transformers backend passes this check before it serves. Two short random prompts are computed in
uneven pieces, side by side, and compared with the model's own pass over each whole prompt. A model that mixes tokens
in a way that `modes.py` does not know fails here, instead of giving bad text later.

Knows forward functions. Does not know backends: a short implementation here computes paged attention, so that a
wrong kernel cannot be mistaken for a wrong model.

Shape suffixes: T tokens of one pass, N of one prompt, H query heads, K key/value heads, D head size, V vocabulary.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from quire.attention.base import AttentionSpec
from quire.layers.attention import Attention

CHECK = "quire-check"
PROMPT_LENGTHS = (11, 8)
# (prompt, first token, number of tokens), by step: chunks, a decode beside a chunk, the rows in reverse order.
STEPS = (
    ((0, 0, 5), (1, 0, 3)),
    ((1, 3, 1), (0, 5, 4)),
    ((0, 9, 1), (1, 4, 4)),
    ((0, 10, 1),),
)
EXACT = 1e-3  # float32: largest relative difference of a token's logits
ROUGH = 0.05  # 16-bit formats, if rounding cannot be measured


def prompts(vocab_size: int, device: torch.device | str) -> list[Tensor]:
    """The random prompts, the same on every machine."""
    generator = torch.Generator().manual_seed(20)
    return [
        torch.randint(min(3, vocab_size - 1), vocab_size, (n,), generator=generator).to(device)
        for n in PROMPT_LENGTHS
    ]


def difference(
    ids: list[Tensor],
    plain: Callable[[Tensor], Tensor],
    step: Callable[[list[tuple[int, int, Tensor]]], list[Tensor]],
    limit: float,
    spare: bool,
) -> str | None:
    """Compare pieces with whole prompts; None if they agree, else a clause that says how much they differ.

    Args:
        plain: ids_N -> logits_NV by the model's own forward.
        step: [(row, start, ids_T), ...] -> logits_TV of each, computed together.
        limit: largest relative difference of a token's logits.
        spare: a quarter of the tokens may exceed it: in 16 bits, rounding may change a router's choice.
    """
    expected = [plain(ids_N).float() for ids_N in ids]
    if not all(bool(torch.isfinite(w).all()) for w in expected):
        return "its own plain pass gives numbers that are not finite"
    got = [torch.empty_like(w) for w in expected]
    for pieces in STEPS:
        results = step([(row, start, ids[row][start : start + n]) for row, start, n in pieces])
        for (row, start, n), logits_TV in zip(pieces, results, strict=True):
            if logits_TV.shape != got[row][start : start + n].shape:
                return f"logits have shape {tuple(logits_TV.shape)}"
            got[row][start : start + n] = logits_TV.float()
    errors = torch.cat([_distance(w, g) for w, g in zip(expected, got, strict=True)])
    missed = int((~(errors <= limit)).sum())  # not (a > b): nan counts as missed
    if missed <= (len(errors) // 4 if spare else 0):
        return None
    return f"{missed} of {len(errors)} tokens differ from its plain pass, by up to {float(errors.max()):.1g}"


def rounding(
    ids: list[Tensor], first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor]
) -> float:
    """The limit that rounding alone justifies, measured between two orders of summation; ROUGH if they are equal."""
    distances = [_distance(first(ids_N).float(), second(ids_N).float()) for ids_N in ids]
    middle = float(torch.cat(distances).median())
    return max(0.02, 3 * middle) if middle > 0 else ROUGH


def _distance(expected_NV: Tensor, got_NV: Tensor) -> Tensor:
    centred = expected_NV - expected_NV.mean(-1, keepdim=True)
    return (expected_NV - got_NV).norm(dim=-1) / centred.norm(dim=-1).clamp_min(1e-12)


# ------------------------------------------------------------------------------------------- attention


class _Rows:
    """The check's keys and values, by layer and row."""

    def __init__(self) -> None:
        self.cache: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.pieces: list[tuple[int, int, int]] = []  # (row, start, tokens) of the running pass

    def attend(self, layer: Attention, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        outputs, offset = [], 0
        for row, start, n in self.pieces:
            key = (layer.layer_index, row)
            k_NKD, v_NKD = k_TKD[offset : offset + n], v_TKD[offset : offset + n]
            if start:
                old_k, old_v = self.cache[key]
                k_NKD, v_NKD = torch.cat([old_k, k_NKD]), torch.cat([old_v, v_NKD])
            self.cache[key] = (k_NKD, v_NKD)
            outputs.append(_attention(layer.spec, q_THD[offset : offset + n], k_NKD, v_NKD, start))
            offset += n
        return torch.cat(outputs)


def _attention(
    spec: AttentionSpec, q_THD: Tensor, k_NKD: Tensor, v_NKD: Tensor, start: int
) -> Tensor:
    """The attention of a layer in float32, for tokens start .. start + T over their row's N keys."""
    groups = spec.num_heads // spec.num_kv_heads
    k_NHD = k_NKD.float().repeat_interleave(groups, 1)
    v_NHD = v_NKD.float().repeat_interleave(groups, 1)
    scores_HTN = torch.einsum("thd,nhd->htn", q_THD.float(), k_NHD) * spec.scale
    if spec.softcap:
        scores_HTN = spec.softcap * torch.tanh(scores_HTN / spec.softcap)
    query_T1 = torch.arange(start, start + len(q_THD), device=q_THD.device)[:, None]
    key_1N = torch.arange(len(k_NKD), device=q_THD.device)[None]
    seen_TN = key_1N <= query_T1
    if spec.window is not None:
        seen_TN &= key_1N > query_T1 - spec.window
    scores_HTN = scores_HTN.masked_fill(~seen_TN, float("-inf"))
    if spec.sinks is not None:
        sinks_HT1 = spec.sinks.float()[:, None, None].expand(-1, len(q_THD), 1)
        weights_HTN = torch.cat([scores_HTN, sinks_HT1], -1).softmax(-1)[..., :-1]
    else:
        weights_HTN = scores_HTN.softmax(-1)
    return torch.einsum("htn,nhd->thd", weights_HTN, v_NHD).to(q_THD.dtype)


_rows: _Rows | None = None
_checking = threading.Lock()  # two loads at once take turns


@contextmanager
def checking() -> Iterator[_Rows]:
    """Inside, the attention implementation CHECK uses the rows that this yields."""
    global _rows
    with _checking:
        _rows = _Rows()
        try:
            yield _rows
        finally:
            _rows = None


def register(handle: str) -> None:
    """Register CHECK with Transformers; `handle`: the attribute of an attention module that has Quire's spec."""

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        if _rows is None:
            raise RuntimeError(f"attention {CHECK!r} is for checking only")
        q_THD, k_TKD, v_TKD = (x[0].transpose(0, 1) for x in (query, key, value))
        return _rows.attend(getattr(module, handle), q_THD, k_TKD, v_TKD)[None].contiguous(), None

    AttentionInterface.register(CHECK, attend)
