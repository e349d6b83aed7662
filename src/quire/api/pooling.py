"""The pooling methods of LLM: encode, embed, classify, score and reward.

Knows prompts, tasks and how many requests are in the engine at once. `frontend/pooling` checks and reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import count
from typing import Any

from quire.api.progress import Progress, progress
from quire.api.prompt_batch import Priority, forgotten_on_failure, spread
from quire.engine.client import EngineClient
from quire.errors import QuireError, ValidationError
from quire.frontend.adapters import names_for
from quire.frontend.outputs import error_of
from quire.frontend.pooling.inputs import PoolingInputs, ways
from quire.frontend.pooling.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from quire.frontend.pooling.pair_media import read_program_pairs
from quire.frontend.pooling.scores import PairOptions
from quire.frontend.prompts import Prompt, read_prompts
from quire.frontend.request_manager import RequestManager
from quire.protocol.pooling_params import PoolingParams

Given = PoolingParams | Sequence[PoolingParams] | None
Found = PoolingRequestOutput[PoolingOutput]
PROMPT_GROUP = 64  # prompts that are tokenized together


class PoolingMethods:
    """Base class of LLM, which has these attributes."""

    client: EngineClient
    front: RequestManager
    request_counter: count[int]
    _running: AbstractContextManager[Any]
    _asleep: bool
    _uncollected: dict[str, Any]

    def _turn(self) -> Iterator[Any]:
        raise NotImplementedError

    def encode(
        self, prompts: Any, pooling_params: Given = None, *, use_tqdm: Progress = True,
        lora_request: Any = None, pooling_task: str | None = None, priority: Priority = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Found]:  # fmt: skip
        """The output tensor of each prompt, in order.

        Args:
            prompts: text, token ids, a dict, or a list of these.
            pooling_params: one for all, or one for each.
            pooling_task: embed, classify, token_embed or token_classify; None: the model's.
            priority, tokenization_kwargs: as `generate`.

        Raises:
            ValidationError: an invalid prompt or parameter, or a task that the model does not have.
            EngineDeadError: the engine has stopped.
        """
        pooling = self.front.need_pooling("LLM.encode")
        given = read_prompts(prompts)
        params_by_prompt = spread("pooling_params", pooling_params, len(given))
        params = [pooling.params(one, pooling_task) for one in params_by_prompt]
        batch = _Tokenized(pooling, given, params, tokenization_kwargs)
        loras = spread("lora_request", lora_request, len(given))
        return self._pool(
            batch, params, spread("priority", priority or 0, len(given)), loras, use_tqdm
        )

    def embed(
        self, prompts: Any, *, pooling_params: Given = None, use_tqdm: Progress = True, **options: Any,
    ) -> list[EmbeddingRequestOutput]:  # fmt: skip
        """A vector for each prompt: `.outputs.embedding`. `options`, errors: as `encode`."""
        self._check_task("LLM.embed", "embed")
        outputs = self.encode(
            prompts, pooling_params, pooling_task="embed", use_tqdm=use_tqdm, **options
        )
        return [EmbeddingRequestOutput.from_base(one) for one in outputs]

    def classify(
        self, prompts: Any, *, pooling_params: Given = None, use_tqdm: Progress = True, **options: Any,
    ) -> list[ClassificationRequestOutput]:  # fmt: skip
        """Probabilities of the classes for each prompt: `.outputs.probs`. `options`, errors: as `encode`."""
        self._check_task("LLM.classify", "classify")
        outputs = self.encode(
            prompts, pooling_params, pooling_task="classify", use_tqdm=use_tqdm, **options
        )
        return [ClassificationRequestOutput.from_base(one) for one in outputs]

    def reward(
        self, prompts: Any, *, pooling_params: Given = None, use_tqdm: Progress = True, **options: Any,
    ) -> list[Found]:  # fmt: skip
        """The outputs of a reward model: one for each prompt, or for each token or step. As `encode`."""
        task = self.front.need_pooling("LLM.reward").task("reward")
        return self.encode(prompts, pooling_params, pooling_task=task, use_tqdm=use_tqdm, **options)

    def score(
        self, data_1: Any, data_2: Any, /, *, use_tqdm: Progress = True,
        pooling_params: PoolingParams | None = None, lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None, chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None, instruction: str | None = None,
    ) -> list[ScoringRequestOutput]:  # fmt: skip
        """How well the texts of each pair fit: `.outputs.score`.

        Args:
            data_1, data_2: texts, 1:1, 1:N or N:N; {"content": [parts]} has pictures, as in `chat`.
            chat_template: makes the prompt of a pair, from messages with the roles query and document.
            instruction: for the template.
            All others: as `encode`. `pooling_params.extra_kwargs`: max_tokens_per_query, max_tokens_per_doc.

        Raises:
            ValidationError: as `encode`; also a model without scores, and texts that make no pairs.
        """
        more = dict((pooling_params and pooling_params.extra_kwargs) or {})
        limits = {name: more.get(name, 0) for name in ("max_tokens_per_query", "max_tokens_per_doc")}  # fmt: skip
        options = PairOptions(instruction, chat_template, dict(chat_template_kwargs or {}), **limits)  # fmt: skip
        pairs = read_program_pairs(self.front, data_1, data_2, options)
        params = [pairs.params(pooling_params)] * pairs.num_prompts
        prompts = pairs.prompts(0, pairs.num_prompts)
        pooling = self.front.need_pooling("LLM.score")
        batch = _Tokenized(pooling, prompts, params, tokenization_kwargs)
        outputs = self._pool(
            batch, params, [0] * len(params), [lora_request] * len(params), use_tqdm
        )
        shared = len(outputs) - len(pairs.documents)  # the queries' outputs come first
        return [
            ScoringRequestOutput(one.request_id, ScoringOutput(score), _read(outputs, shared, index), one.num_cached_tokens,
                                 cached_tokens_by_source=one.cached_tokens_by_source)
            for index, (one, score) in enumerate(zip(outputs[shared:], pairs.scores(outputs), strict=True))
        ]  # fmt: skip

    def _check_task(self, method: str, task: str) -> None:
        """Raises ValidationError that names the methods for the model's tasks."""
        info = self.front.need_pooling(method).info
        if task not in info.tasks:
            raise ValidationError(
                f"{method} needs a model for {task}; this one is for {ways(info.tasks)}"
            )

    def _pool(
        self, batch: _Tokenized, params: Sequence[PoolingParams], priorities: Sequence[int],
        loras: Sequence[Any], use_tqdm: Progress,
    ) -> list[Found]:  # fmt: skip
        """Run requests, at most twice the engine's rows of them at a time. After an error nothing of them remains."""
        adapters = names_for(self.front.adapters, loras)
        ready, max_waiting = iter(batch), 2 * self.client.resolved.max_num_seqs
        ids: list[str] = []
        done: dict[str, Found] = {}
        with self._running, progress(use_tqdm, len(params)) as bar:
            if self._asleep:
                raise QuireError("the engine is asleep; call wake_up() first")
            with forgotten_on_failure(self.front, ids, self._uncollected):
                while len(done) < len(params):
                    while len(ids) < len(params) and len(ids) - len(done) < max_waiting:
                        id, index = str(next(self.request_counter)), len(ids)
                        accepted = self.front.accept(next(ready), params[index], id=id, priority=priorities[index], adapter=adapters[index], lora_request=loras[index])  # fmt: skip
                        self.front.submit(accepted)
                        ids.append(id)
                    waited = set(ids).difference(done)
                    for output in self._turn():
                        if output.request_id in waited:
                            done[output.request_id] = self._uncollected.pop(output.request_id)
                            bar.count(output)
                            if (error := error_of(output)) is not None:
                                raise error
        return [done[id] for id in ids]


class _Tokenized:
    """Prompts, tokenized when they are needed, several at a time."""

    def __init__(
        self, pooling: PoolingInputs, prompts: list[Prompt], params: Sequence[PoolingParams],
        tokenization: Mapping[str, Any] | None,
    ):  # fmt: skip
        self.pooling, self.prompts, self.params = pooling, prompts, params
        self.options = pooling.options(pooling.read_options(tokenization))

    def __iter__(self) -> Iterator[Prompt]:
        for start in range(0, len(self.prompts), PROMPT_GROUP):
            some = self.prompts[start : start + PROMPT_GROUP]
            try:
                yield from self.pooling.tokenize(some, self.options, self.params[start].task or "")
            except ValidationError as error:
                if len(self.prompts) == 1:
                    raise
                raise ValidationError(f"prompts {start} to {start + len(some) - 1}: {error}", parameter=error.parameter, value=error.value) from error  # fmt: skip


def _read(found: Sequence[Found], shared: int, index: int) -> list[int]:
    """The tokens that were read for a pair."""
    if not shared:
        return found[index].prompt_token_ids
    first = found[index if shared > 1 else 0]
    return first.prompt_token_ids + found[shared + index].prompt_token_ids
