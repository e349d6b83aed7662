"""Worker protocol: the engine sends a StepPlan to the workers, a worker sends a StepResult back.

Knows rows, blocks and counts. A plan never carries sampled tokens: the worker already has them in its
rows. Because of this the host can run ahead of the device.
"""

from __future__ import annotations

from msgspec import Struct

from quire.protocol.output import ErrorKind, Logprobs
from quire.protocol.request import MediaItem, RequestParams
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.tensor_data import TensorData


class EnteredRow(Struct, array_like=True, omit_defaults=True, gc=False):
    """A request gets a row: everything that the worker must know about it, sent once."""

    row: int
    id: str
    tokens: list[int]  # all tokens so far, so a resumed request is like a new one
    num_prompt: int  # how many of them are the prompt
    num_computed_tokens: int
    blocks: list[list[int]]  # by KV group; 0 is the null block (outside a window)
    params: RequestParams
    adapter: str | None = None
    # data of the request for hooks, by feature name; all ranks get it
    extras: dict[str, bytes] = {}
    media: list[MediaItem] = []  # what stands in the place of tokens; all ranks get it, once
    num_encoder_tokens: int = 0  # states of the encoder that it attends to; a hook gives them
    trial_length: int = 0  # as in EngineRequest

    @property
    def sampling_params(self) -> SamplingParams:
        """The parameters of a request that generates tokens. Raises TypeError: it generates none."""
        if not isinstance(self.params, SamplingParams):
            raise TypeError(f"request {self.id!r} generates no tokens")
        return self.params


class WorkItem(Struct, array_like=True, omit_defaults=True, gc=False):
    """One row's part of the step."""

    row: int
    num_tokens: int
    new_blocks: list[list[int]] = []  # by KV group; [] when no group grew
    drafts: int = 0  # how many of num_tokens are draft tokens, which the worker already has
    # False: a prompt chunk that is not the last, or a request that generates no tokens
    samples: bool = True
    # With True the worker draws if all the row's tokens are computed then: it may have more than the scheduler knew.


class StepPlan(Struct, array_like=True, omit_defaults=True, gc=False, tag="plan"):
    """One forward pass. A worker first frees the rows of `freed_rows`, then fills the rows of `entered`, then does `work`."""

    step: int
    entered: list[EnteredRow]
    work: list[WorkItem]
    freed_rows: list[int]  # rows released since the last plan
    extras: dict[str, bytes] = {}  # gate -> hook, by feature name


class StepResult(Struct, array_like=True, omit_defaults=True, gc=False, tag="result"):
    """The result of a step. The maps are by the index of the work item in the plan."""

    step: int
    tokens: list[list[int]]  # by work item: none (unfinished chunk), 1, or 1 + accepted drafts
    logprobs: dict[int, Logprobs] = {}
    prompt_logprobs: dict[int, Logprobs] = {}
    errors: dict[int, str] = {}  # only this request fails, for this reason
    kinds: dict[int, ErrorKind] = {}  # of the entries of `errors` that are not internal
    extras: dict[str, bytes] = {}  # hook -> gate
    # tokens that follow without a draw (`Hook.added_tokens`); none of them is computed yet
    added_tokens: dict[int, list[int]] = {}
    # outputs of requests that generate no tokens, with the last chunk
    tensors: dict[int, TensorData] = {}
