"""Fixtures of the GPU checks and timings: model configurations, steps, filled caches, engines.

Knows config.json of the models and the tensors of a step. Weights are random.

Shape suffixes: T tokens, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from quire.engine.client import InlineClient
    from quire.forward_context import ForwardBatch
    from quire.ops.triton.attention import PagedAttentionStep
    from quire.protocol.sampling_params import SamplingParams
    from quire.quantization.wna16 import FewBitsWeight

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "tiny": {
        **LLAMA, "vocab_size": 211, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
        "dtype": "float32",
    },
    "llama-8b": {
        **LLAMA, "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072,
        "dtype": "bfloat16",
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
        "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
        "dtype": "bfloat16",
    },
}  # fmt: skip


def write_config(folder: Path, name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]), encoding="utf-8")


def _of_layers(name: str) -> int:
    c = CONFIGS[name]
    heads, kv, size = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    layer = c["hidden_size"] * (2 * heads * size + 2 * kv * size + 3 * c["intermediate_size"])
    return int(c["num_hidden_layers"] * layer)


def weights_of(name: str, itemsize: float = 2.0) -> int:
    """Bytes of weights that a step reads, without the embedding; the head always has 16 bits."""
    c = CONFIGS[name]
    return int(itemsize * _of_layers(name) + 2 * c["vocab_size"] * c["hidden_size"])


def prefill_flops(name: str, tokens: int) -> float:
    """Operations of one prompt: products with weights, and attention; without the head, which computes one token."""
    c = CONFIGS[name]
    pairs = tokens * (tokens + 1) / 2
    attention = 4.0 * pairs * c["num_attention_heads"] * c["head_dim"] * c["num_hidden_layers"]
    return 2.0 * tokens * _of_layers(name) + attention


def lengths_of_load(small: bool) -> tuple[list[int], list[int]]:
    """Tokens in and out of each request: 256 requests of 100 to 1024, the load of nano-vllm's published figure."""
    rng = random.Random(0)
    requests, low, high = (4, 4, 20) if small else (256, 100, 1024)
    inputs = [rng.randint(low, high) for _ in range(requests)]
    return inputs, [rng.randint(low, high) for _ in range(requests)]


def kv_of(name: str) -> int:
    """Bytes of a token's keys and values, in 16 bits."""
    c = CONFIGS[name]
    return int(4 * c["num_hidden_layers"] * c["num_key_value_heads"] * c["head_dim"])


def step_of(
    done: Sequence[int], counts: Sequence[int], lengths: Sequence[int], device: str
) -> ForwardBatch:
    """A batch whose rows compute `counts` tokens after `done`; each row has consecutive blocks of 16 for `lengths`."""
    from quire.forward_context import ForwardBatch

    firsts, first = [], 1
    for n in lengths:
        firsts.append(first)
        first += -(-n // 16)
    rows = [row for row, n in enumerate(counts) if n]
    ends = [done[row] + counts[row] for row in rows]
    wide = max(-(-n // 16) for n in ends)
    tables = [[firsts[row] + i for i in range(wide)] for row in rows]
    places = [(row, p) for row in rows for p in range(done[row], done[row] + counts[row])]
    starts = torch.tensor([0, *(counts[row] for row in rows)]).cumsum(0)
    positions_T = torch.tensor([p for _, p in places], device=device)
    slots = torch.tensor([firsts[row] * 16 + p for row, p in places], device=device)
    return ForwardBatch(
        token_ids_T=torch.zeros_like(positions_T),
        positions_T=positions_T,
        rows_B=torch.tensor(rows, device=device),
        query_start_B1=starts.int().to(device),
        lengths_B=torch.tensor(ends, dtype=torch.int32, device=device),
        # Beyond a shorter row's blocks, its table has blocks of other rows, which are never read.
        block_tables=[torch.tensor(tables, dtype=torch.int32, device=device).clamp_(max=first - 1)],
        slots=[slots],
        sample_at_S=(starts[1:] - 1).to(device),
        max_query=max(counts),
        max_length=max(ends),
        num_tokens=len(places),
        num_rows=len(rows),
        query_lens=[counts[row] for row in rows],
        lengths=ends,
    )


def filled_cache(
    lengths: Sequence[int], new: int, dtype: torch.dtype, device: str, heads: int, kv_heads: int
) -> tuple[tuple[Tensor, Tensor], PagedAttentionStep, Tensor]:
    """A cache of random keys and values, a step of the last `new` tokens of each row, and their queries; D = 128."""
    from quire.ops.triton.attention import PagedAttentionStep

    batch = step_of([n - new for n in lengths], [new] * len(lengths), lengths, device)
    blocks = sum(-(-n // 16) for n in lengths) + 1
    keys, values = (
        torch.randn(blocks, kv_heads, 16, 128, device=device).to(dtype) for _ in range(2)
    )
    step = PagedAttentionStep(
        batch.block_tables[0], batch.query_start_B1, batch.lengths_B, len(lengths), None,
        len(lengths), None, max(lengths), new,
    )  # fmt: skip
    q_THD = torch.randn(new * len(lengths), heads, 128, device=device).to(dtype)
    return (keys, values), step, q_THD


def eight_bits(weight_OI: Tensor, group: int) -> FewBitsWeight:
    """A W8A16 weight in groups of inputs."""
    from quire.quantization.group_quant import Grouped
    from quire.quantization.int8 import quantize
    from quire.quantization.wna16 import FewBitsWeight

    outs = len(weight_OI)
    q, scale = quantize(weight_OI.reshape(-1, group))
    q_OI, scale_OG = (q.short() + 128).to(torch.uint8).view(outs, -1), scale.view(outs, -1)
    middle_OG = torch.full_like(scale_OG, 128, dtype=torch.uint8)
    return FewBitsWeight(Grouped(q_OI, scale_OG, middle_OG), 8, False)


Ask = Callable[[list[list[int]], "list[SamplingParams]"], list[list[int]]]


@contextmanager
def opened(folder: str, **options: Any) -> Iterator[Ask]:
    """An engine in this process with random weights: tokens in, tokens out."""
    with client_of(folder, **options) as client:

        def ask(prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
            from quire.protocol.request import EngineRequest

            for i, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
                client.submit(EngineRequest(str(i), prompt, param))
            got: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
            left = len(prompts)
            while left:
                for output in client.outputs():
                    if output.finish == "error":
                        raise RuntimeError(output.error)
                    got[output.id] += output.tokens
                    left -= output.finish is not None
            return list(got.values())

        yield ask


@contextmanager
def client_of(folder: str, **options: Any) -> Iterator[InlineClient]:
    from quire.config.engine import EngineConfig
    from quire.engine.build import make_client

    given = {"load_format": "dummy", "skip_tokenizer_init": True, **options}
    client = make_client(EngineConfig.from_keywords(model=folder, **given))
    try:
        yield client
    finally:
        client.close()
        if torch.cuda.is_available():
            import gc

            gc.collect()
            torch.cuda.empty_cache()
