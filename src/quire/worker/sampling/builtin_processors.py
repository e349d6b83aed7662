"""The logits processors for the fields of SamplingParams. `builtin_processors()` gives their order.

Knows what each field means. Does not know how a token is drawn.

    allowed tokens, bad words, min tokens, logit bias, penalties    (top-k, top-p, min-p: top_k_top_p.py)

Shape suffixes: S rows that draw, P of them that use a processor, V vocabulary, E entries (row, token), L tokens
of a row, W tokens of a bad word except its last.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from quire.protocol.plan import EnteredRow
from quire.protocol.request import EMBEDDINGS
from quire.worker.sampling.logits_processors import Processor, ProcessorRows, mask_of

NEG_INF = -torch.inf


def allow_only(logits_V: Tensor, tokens: list[int]) -> None:
    """Allow these tokens only, even those that min_tokens, allowed tokens or bad words excluded."""
    ids_E = _put(np.array(tokens, np.int64), logits_V)
    logits_E = logits_V[ids_E]
    logits_E = logits_E.masked_fill_(logits_E == NEG_INF, 0.0)
    logits_V.fill_(NEG_INF)
    logits_V[ids_E] = logits_E


def _put(array: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(array).to(like.device, non_blocking=True)


class TokenTable(Processor):
    """Base class for processors with a list of tokens for each row; joins the lists of a step."""

    accepts_drafts = True

    def __init__(self) -> None:
        self.tokens: dict[int, np.ndarray] = {}

    def leave(self, row: int) -> None:
        del self.tokens[row]

    def entries(self, selected: ProcessorRows) -> tuple[np.ndarray, np.ndarray]:
        """([E] index in S, [E] token)."""
        lists = [self.tokens[row] for row in selected.rows.tolist()]
        return np.repeat(selected.indices, [len(tokens) for tokens in lists]), np.concatenate(lists)


class AllowedTokens(TokenTable):
    """`allowed_token_ids`: excludes all other tokens."""

    mask_only = True

    def enter(self, new: EnteredRow) -> bool:
        if (tokens := new.sampling_params.allowed_token_ids) is None:
            return False
        self.tokens[new.row] = np.array(sorted(set(tokens)), np.int64)
        return True

    def apply(self, logits_SV: Tensor, selected: ProcessorRows) -> Tensor:
        indices, tokens = (_put(array, logits_SV) for array in self.entries(selected))
        allowed = logits_SV[indices, tokens]
        logits_SV[_put(selected.indices, logits_SV)] = NEG_INF
        logits_SV[indices, tokens] = allowed
        return logits_SV

    def mask(self, words_SW: np.ndarray, selected: ProcessorRows) -> None:
        for index, row in zip(selected.indices.tolist(), selected.rows.tolist(), strict=True):
            words_SW[index] &= mask_of(self.tokens[row], words_SW.shape[1])


class BadWords(Processor):
    """`bad_words`: excludes the last token of a bad word when the output ends with the tokens before it."""

    accepts_drafts = True

    def __init__(self) -> None:
        self.words: dict[int, list[list[int]]] = {}

    def enter(self, new: EnteredRow) -> bool:
        words = [word for word in new.sampling_params.bad_word_ids if word]
        if words:
            self.words[new.row] = words
        return bool(words)

    def leave(self, row: int) -> None:
        del self.words[row]

    def apply(self, logits_SV: Tensor, selected: ProcessorRows) -> Tensor:
        found = [
            (index, row, length, word)
            for index, row, length, outputs in zip(
                selected.indices.tolist(), selected.rows.tolist(), selected.lengths.tolist(),
                selected.outputs.tolist(), strict=True,
            )
            for word in self.words[row]
            if len(word) - 1 <= outputs
        ]  # fmt: skip
        if not found:
            return logits_SV
        at_E, row_E, length_E, words = zip(*found, strict=True)
        most = max(len(word) for word in words) - 1
        penalty_E = torch.full((len(found),), NEG_INF, device=logits_SV.device)
        if most:
            before_EW = np.array(
                [[-1] * (most - len(word) + 1) + word[:-1] for word in words], np.int64
            )
            position_EW = np.array(length_E)[:, None] + np.arange(-most, 0)
            known_EW = selected.state.token_ids_RL[
                _put(np.array(row_E)[:, None], logits_SV),
                _put(np.maximum(position_EW, 0), logits_SV),
            ]
            wanted_EW = _put(before_EW, logits_SV)
            matches_E = ((known_EW == wanted_EW) | (wanted_EW < 0)).all(dim=1)
            penalty_E = penalty_E.masked_fill_(~matches_E, 0.0)
        where = (
            _put(np.array(at_E), logits_SV),
            _put(np.array([word[-1] for word in words]), logits_SV),
        )
        # Added, not assigned: two words may end in the same token, and only one of them may match.
        return logits_SV.index_put_(where, penalty_E, accumulate=True)


class MinTokens(TokenTable):
    """`min_tokens`: excludes tokens that end the request until the output is that long."""

    mask_only = True

    def enter(self, new: EnteredRow) -> bool:
        params = new.sampling_params
        ends = {*params.eos_token_ids, *(params.stop_token_ids or ())}
        if len(new.tokens) - new.num_prompt >= params.min_tokens or not ends:
            return False
        self.tokens[new.row] = np.array(sorted(ends), np.int64)
        return True

    def apply(self, logits_SV: Tensor, selected: ProcessorRows) -> Tensor:
        if (early := self._early(selected)) is None:
            return logits_SV
        indices, tokens = (_put(array, logits_SV) for array in self.entries(early))
        logits_SV[indices, tokens] = NEG_INF
        return logits_SV

    def mask(self, words_SW: np.ndarray, selected: ProcessorRows) -> None:
        if (early := self._early(selected)) is not None:
            for index, row in zip(early.indices.tolist(), early.rows.tolist(), strict=True):
                words_SW[index] &= ~mask_of(self.tokens[row], words_SW.shape[1])

    @staticmethod
    def _early(selected: ProcessorRows) -> ProcessorRows | None:
        """The rows that have too few tokens to end; None: there are none."""
        least = np.array([selected.state.params[row].min_tokens for row in selected.rows])
        early = selected.outputs < least
        if not early.any():
            return None
        return selected.some(early)


class LogitBias(TokenTable):
    """`logit_bias`: adds a value to the logits of some tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[int, np.ndarray] = {}

    def enter(self, new: EnteredRow) -> bool:
        if not (bias := new.sampling_params.logit_bias):
            return False
        self.tokens[new.row] = np.array(list(bias), np.int64)
        self.values[new.row] = np.array(list(bias.values()), np.float32)
        return True

    def leave(self, row: int) -> None:
        super().leave(row)
        del self.values[row]

    def apply(self, logits_SV: Tensor, selected: ProcessorRows) -> Tensor:
        indices, tokens = (_put(array, logits_SV) for array in self.entries(selected))
        values = np.concatenate([self.values[row] for row in selected.rows.tolist()])
        return logits_SV.index_put_((indices, tokens), _put(values, logits_SV), accumulate=True)


class Penalties(Processor):
    """Make tokens that occurred before less likely.

    repetition    in prompt or output: divides a positive logit, multiplies a negative one
    frequency     in output: subtracted once for each time the token occurs
    presence      in output: subtracted once

    Parts of a prompt that are embeddings have no tokens, only placeholders, which do not count.
    """

    accepts_drafts = True

    def __init__(self) -> None:
        self.embeddings: dict[int, list[tuple[int, int]]] = {}
        """By row: [start, end) of the prompt's parts that are embeddings."""

    def enter(self, new: EnteredRow) -> bool:
        p = new.sampling_params
        uses = bool(p.repetition_penalty != 1.0 or p.frequency_penalty or p.presence_penalty)
        parts = [i for i in new.media if uses and i.kind.startswith(EMBEDDINGS)]
        if parts:
            self.embeddings[new.row] = [(i.start, i.start + i.length) for i in parts]
        return uses

    def leave(self, row: int) -> None:
        self.embeddings.pop(row, None)

    def apply(self, logits_SV: Tensor, selected: ProcessorRows) -> Tensor:
        state, device = selected.state, logits_SV.device
        params = [state.params[row] for row in selected.rows.tolist()]
        longest, vocab = int(selected.lengths.max()), logits_SV.shape[1]
        rows_P = _put(selected.rows, logits_SV)
        lengths_P1 = _put(selected.lengths, logits_SV)[:, None]
        prompts_P1 = _put(state.num_prompt[selected.rows], logits_SV)[:, None]
        place_L = torch.arange(longest, device=device)
        ids_PL = state.token_ids_RL[rows_P, :longest].long()
        is_token_PL = place_L < lengths_P1
        for index, row in enumerate(selected.rows.tolist() if self.embeddings else ()):
            for start, end in self.embeddings.get(row, ()):
                is_token_PL[index, start:end] = False
        # Other positions repeat a row's first token, which is harmless: a token's new logit
        # depends only on its count in the output, so every write of it writes the same value.
        first_P1 = is_token_PL.byte().argmax(dim=1, keepdim=True)
        ids_PL = torch.where(is_token_PL, ids_PL, ids_PL.gather(1, first_P1))
        is_output_PL = ((place_L >= prompts_P1) & is_token_PL).float()
        counts_PV = torch.zeros((len(params), vocab), device=device)
        count_PL = counts_PV.scatter_add_(1, ids_PL, is_output_PL).gather(1, ids_PL)

        def column(name: str) -> Tensor:
            return _put(np.array([[getattr(p, name)] for p in params], np.float32), logits_SV)

        at_P1 = _put(selected.indices, logits_SV)[:, None]
        old_PL = logits_SV[at_P1, ids_PL]
        repetition_P1 = column("repetition_penalty")
        new_PL = torch.where(old_PL > 0, old_PL / repetition_P1, old_PL * repetition_P1)
        new_PL = new_PL - column("frequency_penalty") * count_PL
        new_PL = new_PL - column("presence_penalty") * (count_PL > 0)
        has_token_P1 = is_token_PL.any(dim=1, keepdim=True)
        logits_SV[at_P1, ids_PL] = torch.where(has_token_P1, new_PL, old_PL)
        return logits_SV


def builtin_processors(
    penalties: Callable[[], Processor] = Penalties,
) -> tuple[list[Processor], list[Processor]]:
    """The processors that run before users' processors, and those that run after them."""
    return [AllowedTokens(), BadWords(), MinTokens(), LogitBias()], [penalties()]
