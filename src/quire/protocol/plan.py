"""Wire 2: a plan goes down to the workers, a result comes up.

Knows rows, blocks and counts. A plan never carries sampled tokens down: the worker already holds
them in its rows, and that is what lets the host run ahead of the device.
"""

from __future__ import annotations

from msgspec import Struct

from quire.protocol.output import Logprobs
from quire.protocol.sampling_params import SamplingParams


class EnteredRow(Struct, array_like=True, omit_defaults=True, gc=False):
    """A request takes a row: everything the worker must know about it, once."""

    row: int
    id: str
    tokens: list[int]  # all it has, so a resumed request is like a new one
    num_prompt: int  # how many of them are the prompt
    computed: int
    blocks: list[list[int]]  # by cache group; 0 is the null block (outside a window)
    params: SamplingParams
    adapter: str | None = None


class WorkItem(Struct, array_like=True, omit_defaults=True, gc=False):
    """A row's share of the step."""

    row: int
    num_tokens: int
    new_blocks: list[list[int]] = []  # by cache group; [] when no group grew
    drafts: int = 0  # how many of num_tokens are guesses the worker itself holds
    samples: bool = True  # False: a prompt chunk that is not the last
    # True asks for a draw if all that the row knows is computed then: it may know more than the planner did.


class StepPlan(Struct, array_like=True, omit_defaults=True, gc=False, tag="plan"):
    """One forward pass. A worker first drops `left`, then seats `entered`, then does `work`."""

    step: int
    entered: list[EnteredRow]
    work: list[WorkItem]
    left: list[int]  # rows released since the last plan
    extras: dict[str, bytes] = {}  # gate -> hook, by feature name


class StepResult(Struct, array_like=True, omit_defaults=True, gc=False, tag="result"):
    """What a step decided. Maps are by the index of the work item in the plan."""

    step: int
    tokens: list[list[int]]  # by work item: none (unfinished chunk), 1, or 1 + accepted drafts
    logprobs: dict[int, Logprobs] = {}
    prompt_logprobs: dict[int, Logprobs] = {}
    errors: dict[int, str] = {}  # this request alone fails, with this reason
    invalid: list[int] = []  # of those: they failed by what was asked for
    extras: dict[str, bytes] = {}  # hook -> gate
    certain: dict[
        int, list[int]
    ] = {}  # tokens that follow without a draw; nothing of them is computed yet
