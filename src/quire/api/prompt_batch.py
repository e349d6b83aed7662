"""Accepts many prompts with their parameters, which are one for all or one for each.

Knows how to pair the lists. `frontend/input_processor.py` checks each request.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypedDict

import msgspec

from quire.config.unknown_names import UnknownName
from quire.errors import ValidationError
from quire.frontend.adapters import names_for
from quire.frontend.chat import KEYWORDS
from quire.frontend.input_processor import AcceptedRequest
from quire.frontend.media.program_items import with_options
from quire.frontend.prompts import read_prompts
from quire.frontend.request_manager import RequestManager
from quire.protocol.sampling_params import RequestOutputKind, SamplingParams
from quire.protocol.validators import wrong

Params = SamplingParams | Sequence[SamplingParams] | None
Priority = int | Sequence[int] | None


class BatchOptions(TypedDict, total=False):
    """Options of prompts besides their sampling parameters."""

    lora_request: Any
    priority: Priority
    tokenization_kwargs: Mapping[str, Any] | None
    mm_processor_kwargs: Mapping[str, Any] | None


REMOVED = {
    "prompt_token_ids": 'pass lists of token ids, or {"prompt_token_ids": [...]}, as prompts',
    "guided_options_request": "use SamplingParams(structured_outputs=...)",
}
"""Keyword of earlier versions of vLLM -> what to do instead."""


def accept_all(
    front: RequestManager,
    ids: Iterator[str],
    prompts: Any,
    params: Params,
    *,
    lora_request: Any = None,
    priority: Priority = None,
    tokenization_kwargs: Mapping[str, Any] | None = None,
    mm_processor_kwargs: Mapping[str, Any] | None = None,
    **unknown: Any,
) -> list[AcceptedRequest]:
    """Check all requests before any is sent. Each request gets a single, final output.

    Raises:
        ValidationError: names the index of the prompt if there are several.
        UnknownName: a keyword that `LLM.generate` and `LLM.chat` do not have.
    """
    for name in unknown:
        known = f"choose from {', '.join(BatchOptions.__annotations__)}; LLM.chat also has {', '.join(KEYWORDS)}"
        raise UnknownName(f"unknown keyword {name}; {REMOVED.get(name) or known}")
    parsed = with_options(read_prompts(prompts), mm_processor_kwargs)
    params_by_prompt = spread("sampling_params", params, len(parsed))
    order = spread("priority", 0 if priority is None else priority, len(parsed))
    loras = spread("lora_request", lora_request, len(parsed))
    adapters = names_for(front.adapters, loras)
    final: dict[int, SamplingParams] = {}
    accepted = []
    for number, prompt in enumerate(parsed):
        asked = (
            front.inputs.defaults.params()
            if params_by_prompt[number] is None
            else params_by_prompt[number]
        )
        if not isinstance(asked, SamplingParams):
            raise wrong("sampling_params", asked, "a SamplingParams")
        if id(params_by_prompt[number]) not in final:
            final[id(params_by_prompt[number])] = msgspec.structs.replace(
                asked, output_kind=RequestOutputKind.FINAL_ONLY
            )
        try:
            one = front.accept_generation(
                prompt, final[id(params_by_prompt[number])], id=next(ids), priority=order[number],
                tokenization_kwargs=tokenization_kwargs, adapter=adapters[number],
                lora_request=loras[number],
            )  # fmt: skip
        except ValidationError as error:
            if len(parsed) == 1:
                raise
            raise ValidationError(
                f"prompt {number}: {error}", parameter=error.parameter, value=error.value
            ) from error
        accepted.append(one)
    return accepted


@contextmanager
def forgotten_on_failure(
    front: RequestManager, ids: Iterable[str], outputs: dict[str, Any]
) -> Iterator[None]:
    """If the block fails, abort the requests `ids` and drop their `outputs`: after Ctrl-C, or an error of one of them, the
    next call must not find the others."""
    try:
        yield
    except BaseException:
        with suppress(Exception):
            front.abort(ids)
        for id in ids:
            outputs.pop(id, None)
        raise


def spread(name: str, value: Any, count: int) -> Sequence[Any]:
    """One entry for each of `count` prompts, from one for all or one for each.

    Raises:
        ValidationError: the number of entries is not the number of prompts.
    """
    if not isinstance(value, (list, tuple)):
        return [value] * count
    if len(value) != count:
        raise ValidationError(
            f"{name} has {len(value)} entries for {count} prompts; pass one for all prompts, or one for each",
            parameter=name,
            value=len(value),
        )
    return value
