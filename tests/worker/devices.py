"""A tiny model without attention and a way to drive a worker by hand."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quire.protocol.plan import EnteredRow, StepPlan, WorkItem
from quire.protocol.sampling_params import SamplingParams
from quire.worker.model_input import TokenModelInput
from quire.worker.request_rows import RequestRows
from quire.worker.sampling.sampler import Sampler
from quire.worker.worker import Worker

VOCAB = 211
LENGTH = 64
BLOCK = 4


class TinyModel(nn.Module):
    """Logits depend on the last token and its position. Rows are computed one by one, so equal to the bit."""

    def __init__(self, vocab: int = VOCAB, spread: float = 3.0):
        super().__init__()
        made = torch.Generator().manual_seed(0)
        self.tokens = nn.Parameter(torch.randn(vocab, 16, generator=made), requires_grad=False)
        self.places = nn.Parameter(torch.randn(LENGTH, 16, generator=made), requires_grad=False)
        self.head = nn.Parameter(
            torch.randn(vocab, 16, generator=made) * spread / 5, requires_grad=False
        )
        self.vocab_size = vocab
        self.nan_after: set[int] = set()  # tokens after which the logits are NaN
        self.fail = False

    def embed(self, ids_T: Tensor) -> Tensor:
        bad = torch.tensor([int(i) in self.nan_after for i in ids_T])
        return self.tokens[ids_T].masked_fill(bad[:, None], torch.nan)

    def forward(self, embeddings_TD: Tensor, positions_T: Tensor) -> Tensor:
        if self.fail:
            raise ValueError("the toy fails")
        return embeddings_TD + self.places[positions_T]

    def logits(self, hidden_SD: Tensor) -> Tensor:
        return (hidden_SD[:, None, :] * self.head).sum(dim=-1)

    def attention_layers(self) -> list[nn.Module]:
        return []

    def after(self, token: int, position: int) -> Tensor:
        """The logits that follow this token at this position."""
        hidden = self.tokens[token] + self.places[position]
        return (hidden * self.head).sum(dim=-1)


def make_worker(model: nn.Module | None = None, max_rows: int = 8, **sink) -> Worker:
    model = model or TinyModel()
    rows = RequestRows(max_rows, LENGTH, 1, BLOCK)
    return Worker(None, model, TokenModelInput(model), Sampler(model, rows, **sink), [], rows)


def enter(
    row: int,
    tokens: list[int],
    params: SamplingParams,
    num_prompt: int | None = None,
    computed: int = 0,
) -> EnteredRow:
    blocks = [[1 + row * 16 + i for i in range(LENGTH // BLOCK)]]
    prompt = len(tokens) if num_prompt is None else num_prompt
    return EnteredRow(row, f"r{row}", tokens, prompt, computed, blocks, params)


class Driver:
    """Steps a worker: who enters, how many tokens each row takes, who leaves."""

    def __init__(self, worker: Worker):
        self.worker, self.step = worker, 0
        self.left: list[int] = []

    def __call__(self, work: list[WorkItem], entered: list[EnteredRow] = ()):
        self.step += 1
        left, self.left = self.left, []
        return self.worker.run(StepPlan(self.step, list(entered), work, left)).result()


def generate(worker: Worker, prompts: dict[int, tuple[list[int], SamplingParams]], count: int):
    """Texts by row, of rows that run together from start to end."""
    drive = Driver(worker)
    entered = [enter(row, tokens, params) for row, (tokens, params) in prompts.items()]
    work = [WorkItem(row, len(tokens)) for row, (tokens, _) in prompts.items()]
    texts: dict[int, list[int]] = {row: [] for row in prompts}
    results = []
    for index in range(count):
        result = drive(work, entered if not index else [])
        results.append(result)
        for row, tokens in zip(prompts, result.tokens, strict=True):
            texts[row] += tokens
        work = [WorkItem(row, 1) for row in prompts]
    drive.left = list(prompts)
    drive([])
    return texts, results


class Executed:
    """An executor in the place of a worker."""

    def __init__(self, executor):
        self.run = executor.launch


def follow(model: TinyModel, tokens: list[int], count: int) -> list[int]:
    """The greedy continuation of a text."""
    tokens = list(tokens)
    for _ in range(count):
        tokens.append(int(model.after(tokens[-1], len(tokens) - 1).argmax()))
    return tokens[-count:]
