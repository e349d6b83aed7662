"""The EngineOutput of a request, from the result of a step.

Knows what the engine reports to a frontend about a request. Does not know blocks or rows.
"""

from __future__ import annotations

from quire.protocol.output import EngineOutput
from quire.protocol.plan import StepResult
from quire.protocol.sampling_params import SamplingParams
from quire.scheduler.request import Request


def output_of(request: Request, tokens: list[int], index: int, result: StepResult) -> EngineOutput:
    """What work item `index` adds to the request: `tokens`, log-probabilities, a tensor; and its end."""
    output = EngineOutput(request.id, tokens, request.finish, client=request.client)
    params = request.params
    if isinstance(params, SamplingParams) and request.finish == "stop":
        output.stopped_by = tokens[-1] if tokens[-1] in params.stop_token_ids else None
    if request.finish or len(request.tokens) - len(tokens) <= request.num_prompt:
        output.num_cached_tokens, output.queued = request.num_cached_tokens, request.queued
        output.preemptions = request.preemptions
        if request.num_cached_tokens:
            output.loaded_tokens = request.loaded_tokens
        shared = min(request.num_shared_tokens, request.num_prompt)
        output.num_cache_creation_tokens = max(shared - request.num_cached_tokens, 0)
    if result.logprobs and (logprobs := result.logprobs.get(index)):
        output.logprobs = logprobs.first(len(tokens))
    if result.prompt_logprobs:
        output.prompt_logprobs = result.prompt_logprobs.get(index)
    if result.tensors:
        output.tensor = result.tensors.get(index)
    return output
