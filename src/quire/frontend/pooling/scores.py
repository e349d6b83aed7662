"""Scores of pairs of texts: what the model reads of each pair, and the score from its outputs.

    classify     a model with one label reads both texts at once (cross-encoder)
    embed        the similarity of two vectors (bi-encoder): the dot product of vectors of length 1, unless the checkpoint has another
    token_embed  sum over the query's tokens of the largest dot product with a token of the document (late interaction)

A text of models that compare vectors may have pictures: then it is a prompt that is tokenized already. Knows texts, templates and
vectors. Does not know HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from quire.errors import Unsupported, ValidationError
from quire.frontend.chat import ChatOptions
from quire.frontend.pooling.inputs import ways
from quire.frontend.pooling.outputs import PoolingOutput, PoolingRequestOutput
from quire.frontend.pooling.tokenization import cut_text
from quire.frontend.prompts import Prompt
from quire.frontend.request_manager import RequestManager
from quire.logging import get_logger
from quire.protocol import validators as read
from quire.protocol.pooling_info import PoolingInfo
from quire.protocol.pooling_params import PoolingParams

log = get_logger(__name__)

Outputs = Sequence[PoolingRequestOutput[PoolingOutput]]
PairText = str | Prompt
"""A text of a pair, or one with pictures, as the prompt of a conversation; its `text` is that of its parts."""
LATE = "late interaction"
OF_LENGTH_1 = ("cosine", LATE)


def score_task(info: PoolingInfo) -> str:
    """The task whose outputs give a score. Raises ValidationError: the model has none."""
    for task in info.tasks:
        if task in ("embed", "token_embed") or (task == "classify" and info.num_labels == 1):
            return task
    raise ValidationError(
        "scores need a model with vectors, or one with a single label; this one has"
        f" {info.num_labels} labels ({ways(info.tasks)})"
    )


@dataclass(slots=True)
class PairOptions:
    """How to make prompts of pairs."""

    instruction: str | None = None
    template: str | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    max_tokens_per_query: int = 0
    max_tokens_per_doc: int = 0

    @property
    def variables(self) -> dict[str, Any]:
        """Of the template, with the instruction."""
        given = {} if self.instruction is None else {"instruction": self.instruction}
        return given | self.template_kwargs


def content_of(one: Any) -> Any:
    """The content of one text of a pair."""
    return one.get("content") or one.get("text") if isinstance(one, Mapping) else one


def conversations_of(
    queries: Sequence[Any], documents: Sequence[Any]
) -> Iterator[list[dict[str, Any]]]:
    """The messages of each pair, 1:N or N:N, for a template that reads both texts at once."""
    for number, document in enumerate(documents):
        both = {"query": queries[number if len(queries) > 1 else 0], "document": document}
        yield [{"role": role, "content": content_of(one)} for role, one in both.items()]


def read_text(value: Any, name: str) -> str:
    """A text: a string, or {content: [parts]}.

    Raises:
        ValidationError: something else. Unsupported: media.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        if isinstance(text := value.get("text"), str):
            return text
        parts = value.get("content")
        if isinstance(parts, str):
            return parts
        if isinstance(parts, list) and parts:
            return "\n".join(_part(part, f"{name}.content[{at}]") for at, part in enumerate(parts))
    raise read.wrong(name, value, "a text, {content: [parts]}, or a list of these")


def _part(part: Any, name: str) -> str:
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return str(part["text"])
    if isinstance(part, Mapping) and isinstance(part.get("type"), str) and part["type"] != "text":
        raise Unsupported(
            f"{name}: parts of type {part['type'][:40]} in pairs",
            "send text, ask /score for the scores of pictures, or /v1/embeddings for their vectors",
        )
    raise read.wrong(name, part, '{"type": "text", "text": ...}')


def check_shapes(queries: Sequence[Any], documents: Sequence[Any], names: tuple[str, str]) -> None:
    """Raises ValidationError: not 1:1, 1:N or N:N."""
    if len(queries) not in (1, len(documents)):
        raise ValidationError(
            f"{names[0]} has {len(queries)} texts and {names[1]} {len(documents)}: send one for all, or as many",
            parameter=names[0],
            value=len(queries),
        )


@dataclass(slots=True)
class Pairs:
    """Pairs of texts; one query may belong to all documents."""

    front: RequestManager
    queries: Sequence[PairText]
    documents: Sequence[PairText]
    options: PairOptions
    task: str = ""
    rendered: list[Prompt] = field(default_factory=list)
    """The prompt of each pair, if it is tokenized already: with pictures, for a model that reads both texts at once."""
    _queries_cut: dict[int, str] = field(default_factory=dict)
    """Number of a query -> its beginning, so that it is cut once, not for each document."""

    def __post_init__(self) -> None:
        """Raises ValidationError: options that the model cannot follow."""
        info = self.front.need_pooling("a score").info
        self.task, options = score_task(info), self.options
        for name in ("max_tokens_per_query", "max_tokens_per_doc"):
            limit = read.whole_number(name, getattr(options, name), 0)
            if limit >= (max_model_len := self.front.inputs.max_model_len):
                raise ValidationError(f"{name} must be less than max_model_len, which is {max_model_len}; it is {limit}", parameter=name, value=limit)  # fmt: skip
        if any(isinstance(one, Prompt) for one in (*self.queries, *self.documents)):
            self.check_media()
        if self.renders:
            return
        if options.instruction:
            raise ValidationError(
                "instruction needs a chat template with the roles query and document: start the server with"
                " --chat-template, or leave it out",
                parameter="instruction",
            )
        if self.task == "classify" and not info.use_sep_token:
            log.warning_every("template", 3600, "pairs are concatenated: this reranker needs a template of its own; set --chat-template")  # fmt: skip

    def check_media(self) -> None:
        """Raises Unsupported: the model reads both texts of a pair at once, or texts must be cut."""
        if self.task == "classify":
            raise Unsupported("pictures in pairs for a model that reads both texts at once, without a template", "set --chat-template, send text, or serve a model with vectors")  # fmt: skip
        self.check_uncut()

    def check_uncut(self) -> None:
        """Raises Unsupported: texts with pictures must be cut."""
        for name in ("max_tokens_per_query", "max_tokens_per_doc"):
            if getattr(self.options, name):
                raise Unsupported(f"{name} beside pictures", f"leave {name} out")

    @property
    def renders(self) -> bool:
        """Whether a template makes the prompt of a pair: the server's own, or one that a program passes."""
        template = self.options.template or self.front.client.resolved.config.model.chat_template
        return self.task == "classify" and template is not None

    @property
    def similarity(self) -> str:
        """How vectors are compared: a key of `SIMILARITIES`."""
        info = self.front.need_pooling("a score").info
        return LATE if self.task == "token_embed" else info.similarity

    def params(self, value: PoolingParams | None = None) -> PoolingParams:
        """Raises ValidationError: a parameter does not fit the model."""
        params = self.front.need_pooling("a score").params(value, self.task)
        if self.task == "classify":
            return params
        unit = True if self.similarity in OF_LENGTH_1 else None
        return msgspec.structs.replace(params, use_activation=unit)

    @property
    def num_prompts(self) -> int:
        if self.task == "classify":
            return len(self.documents)
        return len(self.queries) + len(self.documents)

    def prompts(self, start: int, stop: int) -> list[Prompt]:
        """Some of the prompts, not tokenized yet, unless they are `rendered`. Raises ValidationError: the template refuses a pair."""
        if self.rendered:
            return self.rendered[start:stop]
        return [self._prompt(index) for index in range(start, min(stop, self.num_prompts))]

    def size(self, index: int) -> int:
        """Characters of a prompt, about."""
        if self.rendered:
            return len(self.rendered[index].tokens)
        first, second = self._texts(index)
        return len(first.tokens if isinstance(first, Prompt) else first) + len(shown(second or ""))

    def _texts(self, index: int) -> tuple[PairText, PairText | None]:
        queries = self.queries
        if self.task == "classify":
            return queries[index if len(queries) > 1 else 0], self.documents[index]
        return queries[index] if index < len(queries) else self.documents[index - len(queries)], None  # fmt: skip

    def _prompt(self, index: int) -> Prompt:
        first, second = self._texts(index)
        options = self.options
        if isinstance(first, Prompt):
            return first
        if second is None:
            limit = options.max_tokens_per_query if index < len(self.queries) else options.max_tokens_per_doc  # fmt: skip
            return Prompt(self._cut(first, limit))
        number = index if len(self.queries) > 1 else 0
        if (cut := self._queries_cut.get(number)) is None:
            cut = self._queries_cut[number] = self._cut(first, options.max_tokens_per_query)
        first = cut
        second = self._cut(shown(second), options.max_tokens_per_doc)
        if self.renders:
            return Prompt(self._rendered(first, second))
        if self.front.need_pooling("a score").info.use_sep_token:
            return Prompt(first, second=second)
        return Prompt(first + second)

    def _cut(self, text: str, most: int) -> str:
        if not most:
            return text
        self.front.inputs.check_size(text, truncated=True)
        return cut_text(self.front.need_tokenizer(), text, most)

    def _rendered(self, query: str, document: str) -> str:
        (messages,) = conversations_of([query], [document])
        options = ChatOptions(
            add_generation_prompt=False,
            template=self.options.template,
            template_kwargs=self.options.variables,
        )
        return self.front.render(messages, options)

    def scores(self, outputs: Outputs) -> list[float]:
        """The score of each pair."""
        arrays = [one.outputs.array for one in outputs]
        if self.task == "classify":
            return [float(one.reshape(-1)[0]) for one in arrays]
        firsts, seconds = arrays[: len(self.queries)], arrays[len(self.queries) :]
        if len(firsts) == 1:
            firsts = firsts * len(seconds)
        compare = SIMILARITIES[self.similarity]
        return [compare(one, other) for one, other in zip(firsts, seconds, strict=True)]


def shown(text: PairText) -> str:
    """The text that an answer repeats."""
    return (text.text or "") if isinstance(text, Prompt) else text


def _late_interaction(query: Any, document: Any) -> float:
    if not len(query) or not len(document):
        return 0.0
    return float((query @ document.T).max(axis=1).sum())


def _dot(query: Any, document: Any) -> float:
    return float(np.dot(query, document))


SIMILARITIES: dict[str, Callable[[Any, Any], float]] = {
    "cosine": _dot,  # of vectors of length 1
    "dot": _dot,
    "euclidean": lambda query, document: -float(np.linalg.norm(query - document)),
    "manhattan": lambda query, document: -float(np.abs(query - document).sum()),
    LATE: _late_interaction,
}
