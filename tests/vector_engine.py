"""An engine with scripted tensors: the real frontend above it, no model below.

A vector counts the tokens by their ids, so that every test can compute it: `vector_of` and its neighbours.
"""

from __future__ import annotations

import json
import queue
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from quire.config.engine import EngineConfig
from quire.engine.engine_state import EngineState
from quire.errors import EngineDeadError
from quire.frontend.tokenizer import load
from quire.protocol.output import EngineOutput, EngineReady, EngineStats, FinishReason
from quire.protocol.pooling_info import PoolingInfo
from quire.protocol.pooling_params import PoolingParams
from quire.protocol.request import EngineRequest
from quire.protocol.tensor_data import TensorData

SIZE = 8
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789:?!"
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
CLS, SEP = 2, 3


def write_bert_tokenizer(folder: Path, template: str | None = None) -> None:
    """One token a letter, spaces dropped; [CLS] a [SEP] b [SEP] with token types, as BERT's."""
    vocabulary = {token: at for at, token in enumerate((*SPECIAL, *LETTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Split("", "isolated")]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )  # fmt: skip
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def letters(text: str) -> list[int]:
    """The ids of a text, special tokens not included."""
    return [len(SPECIAL) + LETTERS.index(letter) for letter in text.replace(" ", "")]


def vector_of(tokens: list[int], params: PoolingParams | None = None) -> np.ndarray:
    """The vector of a prompt: how often each id modulo SIZE occurs, cut, then of length 1."""
    params = params or PoolingParams()
    counts = np.bincount(np.array(tokens[params.pool_from :]) % SIZE, minlength=SIZE)
    found = counts.astype(np.float32)[: params.dimensions]
    if params.use_activation is not False:
        found = found / max(np.linalg.norm(found), 1e-12)
    return found.astype(np.float32)


def rows_of(tokens: list[int], params: PoolingParams | None = None) -> np.ndarray:
    return np.stack([vector_of([token], params) for token in tokens])


def numbers_of(tokens: list[int], params: PoolingParams, labels: int) -> np.ndarray:
    """The numbers of a prompt: the second text counts double."""
    first, second = tokens, []
    if params.second_text:
        first, second = tokens[: params.second_text], tokens[params.second_text :]
    logits = np.array(
        [(sum(first) + 2 * sum(second) + 3 * label) % 7 - 3 for label in range(labels)], np.float32
    )
    if params.use_activation is False:
        return logits
    if labels == 1:
        return (1 / (1 + np.exp(-logits))).astype(np.float32)
    exp = np.exp(logits)
    return (exp / exp.sum()).astype(np.float32)


class VectorClient:
    """An EngineClient of a pooling model (`info`), or of none. Answers at once, unless `held`."""

    def __init__(
        self, folder: Path, info: PoolingInfo | None, max_model_len: int = 32, **config: Any
    ):
        self.tokenizer = load(str(folder))
        found = EngineConfig.from_keywords(model=str(folder), served_model_name="toy", **config)
        self.resolved: Any = SimpleNamespace(
            config=found, path=str(folder), tokenizer_folder=str(folder), hf_config={}, kv_dtype="float32", prefix_caching=True,
            max_num_seqs=4, max_num_batched_tokens=64, architecture="Told", pooling=None, speculation=None, experts_folder="",
        )  # fmt: skip
        self.ready = EngineReady(
            max_model_len=max_model_len, num_blocks=64, block_size=16, vocab_size=len(self.tokenizer),
            dtype="float32", device="cpu", architecture="Told", model_impl="told", depth=1, pooling=info,
        )  # fmt: skip
        self.info = info
        self.asked: list[EngineRequest] = []
        self.aborted: list[str] = []
        self.most_at_once = self.running = 0
        self.held = False
        self.refused: dict[int, str] = {}
        """Number of a request -> the error with which it ends."""
        self.spoken: queue.SimpleQueue[EngineOutput | None] = queue.SimpleQueue()
        self.lock = threading.Lock()

    def tensor(self, request: EngineRequest) -> TensorData:
        params = request.params
        assert isinstance(params, PoolingParams)
        labels = self.info.num_labels if self.info else 0
        match params.task:
            case "embed":
                found = vector_of(request.tokens, params)
            case "token_embed":
                found = rows_of(request.tokens, params)
            case "classify":
                found = numbers_of(request.tokens, params, labels)
            case _:
                found = np.stack([numbers_of([token], params, labels) for token in request.tokens])
        return TensorData("float32", found.shape, found.astype(np.float32).tobytes())

    @property
    def engines(self) -> list[Any]:
        return [self]

    def wait_ready(self, timeout: float | None = None) -> EngineReady:
        return self.ready

    def state(self) -> EngineState:
        return EngineState(0, "ready")

    def check(self) -> None:
        pass

    def stats(self, fresh: bool = False) -> EngineStats:
        return EngineStats()

    def submit(self, request: EngineRequest) -> None:
        msgspec.msgpack.encode(request)  # as if it travelled
        with self.lock:
            self.asked.append(request)
            self.running += 1
            self.most_at_once = max(self.most_at_once, self.running)
        if self.held:
            return
        if (error := self.refused.get(len(self.asked) - 1)) is not None:
            output = EngineOutput(request.id, [], "error", error=error, error_kind="invalid")
        else:
            output = EngineOutput(request.id, [], "stop", tensor=self.tensor(request))
        self.spoken.put(output)

    def abort(self, ids: list[str], why: FinishReason = "abort") -> None:
        self.aborted += ids

    def outputs(self) -> list[EngineOutput]:
        output = self.spoken.get()
        if output is None:
            raise EngineDeadError("shut down")
        self.running -= 1
        return [output]

    def call(self, name: str, *args: Any) -> Any:
        return 0

    def close(self) -> None:
        self.spoken.put(None)


EMBEDS = PoolingInfo(tasks=["embed", "token_embed"], num_dimensions=SIZE, cached_tasks=["embed"])
CLASSIFIES = PoolingInfo(
    tasks=["classify", "token_classify"], num_labels=3, labels=["red", "green", "blue"]
)
RANKS = PoolingInfo(tasks=["classify"], num_labels=1, labels=["LABEL_0"])
