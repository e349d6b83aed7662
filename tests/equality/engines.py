"""Tiny random checkpoints, engines on them, and Transformers' own answer.

Knows `make_client`. Every run here is fp32 on one thread unless it says otherwise.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

from quire.config.engine import EngineConfig
from quire.engine import build
from quire.engine.client import InlineClient
from quire.engine.resolve import resolve_config
from quire.protocol.output import EngineOutput
from quire.protocol.request import EngineRequest
from quire.protocol.sampling_params import SamplingParams

VOCAB = 211
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        }
    },
    "mistral": {"sliding_window": 24, "head_dim": 16},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32, "tie_word_embeddings": True},
    "gemma3_text": {
        "sliding_window": 24,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "tie_word_embeddings": False,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    },
    "gemma4_text": {
        "sliding_window": 24,
        "num_hidden_layers": 5,
        "head_dim": 16,
        "global_head_dim": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
        "num_kv_shared_layers": 3,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 16,
        "tie_word_embeddings": False,
    },
    "cwm": {
        "sliding_window": 24,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512},
    "mamba": {"state_size": 8, "expand": 2},
}
SPREAD = {"gemma3_text": 0.03, "gemma4_text": 0.03}  # of the embedding, which it multiplies


def make_checkpoint(kind: str, folder: Path, **more: Any) -> str:
    """A model that does not repeat itself, and whose norms and biases are not ones and zeros."""
    settings = {**BASE, **KINDS.get(kind, {}), **more}
    if kind in ("gpt2", "mamba"):
        settings = {key: value for key, value in settings.items() if key != "num_attention_heads"}
    torch.manual_seed(len(kind))
    config = transformers.AutoConfig.for_model(kind, **settings)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1 and "A_log" not in name:
                weight.add_(0.2 * torch.randn_like(weight))
            elif "A_log" not in name:
                weight.normal_(std=SPREAD.get(kind, 0.2) if "embed" in name else 0.3)
    model.save_pretrained(folder)
    return str(folder)


@cache
def transformers_model(path: str) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def plain(path: str, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens, by Transformers."""
    model = transformers_model(path)
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=-1,
            pad_token_id=0,
        )
    return [int(token) for token in out[0, len(prompt) :]]


def prompts(count: int, seed: int = 0, longest: int = 60) -> list[list[int]]:
    """Of awkward lengths; each second one shares its beginning with the one before."""
    draw = torch.Generator().manual_seed(seed)
    out: list[list[int]] = []
    for index in range(count):
        length = int(torch.randint(1, longest, (), generator=draw))
        prompt = torch.randint(3, VOCAB, (length,), generator=draw).tolist()
        if index % 2:
            prompt = (out[-1][:40] + prompt)[:longest]
        out.append(prompt)
    return out


class Engine:
    """A client, and the number of requests so far."""

    def __init__(self, client: InlineClient):
        self.client = client
        self.numbers = itertools.count()

    def run(
        self,
        prompts: list[list[int]],
        params: list[SamplingParams] | SamplingParams,
        **fields: Any,
    ) -> list[list[EngineOutput]]:
        """All outputs of each, together in one batch. An error of any is an error of the test. `fields`: of the requests."""
        each = params if isinstance(params, list) else [params] * len(prompts)
        ids = [str(next(self.numbers)) for _ in prompts]
        for id, prompt, param in zip(ids, prompts, each, strict=True):
            self.client.submit(EngineRequest(id, prompt, param, **fields))
        got: dict[str, list[EngineOutput]] = {id: [] for id in ids}
        while not all(outputs and outputs[-1].finish for outputs in got.values()):
            for output in self.client.outputs():
                if output.finish == "error":
                    raise RuntimeError(output.error)
                got[output.id].append(output)
        return [got[id] for id in ids]

    def tokens(
        self,
        prompts: list[list[int]],
        params: list[SamplingParams] | SamplingParams,
        **fields: Any,
    ) -> list[list[int]]:
        runs = self.run(prompts, params, **fields)
        return [[t for out in outs for t in out.tokens] for outs in runs]

    def stats(self) -> dict[str, Any]:
        return dict(self.client.call("stats"))


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, seed=0)


@contextmanager
def engine(path: str, depth: int | None = None, **keywords: Any) -> Iterator[Engine]:
    """An engine in this process; `depth` beyond what flags can say."""
    settings: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 64 << 20,
        **keywords,
    }
    resolved = resolve_config(EngineConfig.from_keywords(model=path, **settings))
    if depth is not None:
        resolved = replace(resolved, depth=depth)
    core, ready = build.build_core(resolved)
    client = InlineClient(core, resolved, ready, core.close)
    try:
        yield Engine(client)
    finally:
        client.close()
