"""RulesProcessor: which tokens a transcription may have, by `DecodingRules`.

Timestamps come in pairs, an end and a start, and never go back; where all timestamps together are likelier than every other
token, the next token is a timestamp. Source: arXiv 2212.04356, and the decoding of openai/whisper.

The rules depend on the tokens of the row alone, which are read on the device: the host does not wait for them.

Shape suffixes: S rows that draw, V vocabulary, L output tokens so far.
"""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from quire.protocol.plan import EnteredRow
from quire.protocol.sound import DecodingRules, decode_rules
from quire.worker.sampling.logits_processors import Processor, ProcessorRows

NEVER = -torch.inf
NAME = "transcription"


class RulesProcessor(Processor):
    order = 60

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        self.of_row: dict[int, DecodingRules] = {}

    @property
    def name(self) -> str:
        return NAME

    def enter(self, new: EnteredRow) -> bool:
        """Raises ValueError: the rules name tokens that the model does not have."""
        if (data := new.extras.get(NAME)) is None:
            return False
        try:
            rules = decode_rules(data)
        except msgspec.MsgspecError as error:
            raise ValueError("these are no rules") from error
        ids = [*rules.suppressed, *rules.first_suppressed, rules.timestamps, rules.no_timestamps]
        ids += [rules.end, *(token for allowed in rules.prefix for token in allowed)]
        if min(ids) < 0 or max(ids) >= self.vocab_size or not all(rules.prefix):
            raise ValueError(f"rules with tokens outside of 0 to {self.vocab_size - 1}")
        self.of_row[new.row] = rules
        return True

    def leave(self, row: int) -> None:
        self.of_row.pop(row, None)

    def apply(self, logits_SV: Tensor, selected: ProcessorRows) -> Tensor:
        columns = selected.indices.tolist(), selected.rows.tolist(), selected.outputs.tolist()
        for index, row, done in zip(*columns, strict=True):
            first = int(selected.state.num_prompt[row])
            output_L = selected.state.token_ids_RL[row, first : first + done]
            self._apply_to(logits_SV[index], self.of_row[row], output_L)
        return logits_SV

    def _apply_to(self, logits_V: Tensor, rules: DecodingRules, output_L: Tensor) -> None:
        done = len(output_L) - len(rules.prefix)
        if done < 0:
            allowed = torch.tensor(rules.prefix[len(output_L)], device=logits_V.device)
            kept = logits_V[allowed]
            logits_V.fill_(NEVER)
            logits_V[allowed] = kept
            return
        suppressed = rules.suppressed + (rules.first_suppressed if not done else [])
        if suppressed:
            logits_V[torch.tensor(suppressed, device=logits_V.device)] = NEVER
        if rules.timestamps:
            time_rules(logits_V, rules, output_L[len(rules.prefix) :])


def time_rules(logits_V: Tensor, rules: DecodingRules, text_L: Tensor) -> None:
    """Apply the rules of timestamps to the logits that follow these tokens. No value of the device is read."""
    start, end = rules.timestamps, rules.end
    times = logits_V[start:]
    logits_V[rules.no_timestamps] = NEVER
    if not len(text_L):
        logits_V[:start] = NEVER
        if rules.max_first is not None:
            logits_V[start + rules.max_first + 1 :] = NEVER
    else:
        is_time_L = text_L >= start
        last = is_time_L[-1]
        before = is_time_L[-2] if len(text_L) > 1 else torch.ones_like(last)
        pair, begun = last & before, last & ~before
        times.masked_fill_(pair, NEVER)
        logits_V[:end].masked_fill_(begun, NEVER)
        latest = torch.where(is_time_L, text_L, -1).amax()
        least = latest + (~begun).to(latest.dtype)
        earlier = torch.arange(start, start + len(times), device=logits_V.device) < least
        times.masked_fill_(earlier & is_time_L.any(), NEVER)
    is_time = times.logsumexp(-1) > logits_V[:start].amax()
    logits_V[:start].masked_fill_(is_time, NEVER)
