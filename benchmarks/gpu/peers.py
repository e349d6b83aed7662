"""The load of `engine.serving` on peers, on the same GPU: Transformers' `generate`, a plain loop, vLLM if installed.

Knows how to run each. The measure is tokens/s over the work that a peer does in its time, because slow peers would not
finish. Weights are random, in the same shape.

The loop is what a developer writes in an afternoon, in the spirit of nano-vllm: rows with caches of a fixed length, one
prefill at a time, one CUDA graph to decode all rows; a free row takes the next request.

Shape suffixes: B rows, T tokens, H query heads, K key/value heads, G = H / K, D head size, L tokens of a cache.
"""

from __future__ import annotations

import importlib
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gpu.fixtures import CONFIGS, lengths_of_load, write_config

if TYPE_CHECKING:
    from benchmarks.gpu.run import Found, Run

SHARE = 0.6  # of a peer's time is measured; the rest is for its start


def _name(run: Run) -> str:
    return "tiny" if run.small else "qwen3-0.6b"


def _prompts(run: Run) -> tuple[list[list[int]], list[int]]:
    inputs, outputs = lengths_of_load(run.small)
    rng = random.Random(0)
    return [[rng.randrange(3, 200) for _ in range(n)] for n in inputs], outputs


def _record(found: Found, tokens: int, seconds: float, whole: int) -> None:
    found["output tokens"], found["of"] = tokens, whole
    found["seconds of them"] = round(seconds, 2)
    found["output tokens a second"] = round(tokens / seconds)


# ------------------------------------------------------------------------------------ Transformers


def transformers(run: Run, found: Found) -> None:
    """`generate` for all prompts in one left-padded batch, for as many tokens as fit its time."""
    import transformers as library

    found["version"] = library.__version__
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), _name(run))
        config = library.AutoConfig.from_pretrained(folder)
    dtype = torch.bfloat16 if run.device == "cuda" else torch.float32
    with torch.device(run.device):
        model = library.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    prompts, outputs = _prompts(run)
    wide = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[0] * (wide - len(p)) + p for p in prompts], device=run.device)
    mask = torch.tensor([[0] * (wide - len(p)) + [1] * len(p) for p in prompts], device=run.device)

    def ask(count: int) -> float:
        began = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=True,
                temperature=0.6, top_k=0, top_p=1.0, pad_token_id=0, eos_token_id=None,
            )  # fmt: skip
        made = out[:, wide:].tolist()  # synchronizes with the device
        if len(made[0]) != count:
            raise RuntimeError(f"it made {len(made[0])} tokens of {count}")
        return time.perf_counter() - began

    ask(2)
    few, more = (2, 4) if run.small else (4, 20)
    each = max(1e-6, (ask(more) - ask(few)) / (more - few))
    count = int(min(max(outputs), max(4, SHARE * run.left / each)))
    seconds = ask(count)
    # A row that is complete generates tokens until the longest row is: those beyond its length do not count.
    wanted = sum(min(n, count) for n in outputs)
    _record(found, wanted, seconds, sum(outputs))
    found["tokens of each at the most"] = count


# ------------------------------------------------------------------------------------ a plain loop


class Plain:
    """A minimal Qwen3 with random weights; caches [layers, 2, B, K, L, D]."""

    def __init__(self, name: str, rows: int, length: int, device: str, dtype: torch.dtype):
        c = CONFIGS[name]
        self.heads, self.kv, self.size = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]  # fmt: skip
        self.eps, hidden, inner = c["rms_norm_eps"], c["hidden_size"], c["intermediate_size"]
        self.length = length

        def new(*shape: int) -> Tensor:
            return torch.randn(shape, device=device).mul_(0.02).to(dtype)

        wide = (self.heads + 2 * self.kv) * self.size
        shapes = ((wide, hidden), (hidden, self.heads * self.size), (2 * inner, hidden), (hidden, inner))  # fmt: skip
        self.layers = [[new(*shape) for shape in shapes] for _ in range(c["num_hidden_layers"])]
        self.table = new(c["vocab_size"], hidden)
        cache = (len(self.layers), 2, rows, self.kv, length, self.size)
        self.cache = torch.zeros(cache, device=device, dtype=dtype)
        turns = 1.0 / c["rope_theta"] ** (torch.arange(0, self.size, 2, device=device) / self.size)
        angle = torch.arange(length, device=device)[:, None] * turns
        self.cos, self.sin = (
            f(torch.cat([angle, angle], -1)).to(dtype) for f in (torch.cos, torch.sin)
        )

    def norm(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), eps=self.eps)

    def turned(self, x_THD: Tensor, positions_T: Tensor) -> Tensor:
        a, b = self.norm(x_THD).chunk(2, -1)
        cos, sin = self.cos[positions_T][:, None], self.sin[positions_T][:, None]
        return torch.cat([a, b], -1) * cos + torch.cat([-b, a], -1) * sin

    def forward(self, ids_T: Tensor, positions_T: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        """Hidden states; `attend(layer, q, k, v)` writes and reads the cache."""
        x = self.table[ids_T]
        for number, (qkv, out, gate_up, down) in enumerate(self.layers):
            parts = (self.norm(x) @ qkv.T).view(len(x), -1, self.size)
            q, k, v = parts.split((self.heads, self.kv, self.kv), 1)
            o = attend(number, self.turned(q, positions_T), self.turned(k, positions_T), v)
            x = x + o.reshape(len(x), -1) @ out.T
            gate, up = (self.norm(x) @ gate_up.T).chunk(2, -1)
            x = x + (F.silu(gate) * up) @ down.T
        return self.norm(x)

    def drawn(self, x_BD: Tensor) -> Tensor:
        """Sample tokens at temperature 0.6."""
        logits = (x_BD @ self.table.T).float() / 0.6
        return (logits - torch.empty_like(logits).exponential_().log_()).argmax(-1)

    def prefill(self, row: int, ids_T: Tensor) -> Tensor:
        """Compute a prompt; return the first token of the row."""

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.cache[layer, 0, row, :, : len(ids_T)] = k.transpose(0, 1)
            self.cache[layer, 1, row, :, : len(ids_T)] = v.transpose(0, 1)
            q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return o[0].transpose(0, 1)

        x = self.forward(ids_T, torch.arange(len(ids_T), device=ids_T.device), attend)
        return self.drawn(x[-1:])[0]

    def decode(self, ids_B: Tensor, positions_B: Tensor, longest: int) -> Tensor:
        """The next token of every row; none has more than `longest` tokens."""
        rows = torch.arange(len(ids_B), device=ids_B.device)
        places = torch.arange(longest, device=ids_B.device)
        seen = (places[None] <= positions_B[:, None])[:, None, None]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.cache[layer, 0, rows, :, positions_B] = k
            self.cache[layer, 1, rows, :, positions_B] = v
            keys, values = self.cache[layer, :, :, :, :longest]
            grouped = q.view(len(q), self.kv, -1, self.size)  # heads of a KV head act as tokens
            return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=seen)

        return self.drawn(self.forward(ids_B, positions_B, attend))


class Recorded:
    """The decode step of all rows, with one CUDA graph for each 256 tokens of the longest row."""

    def __init__(self, model: Plain, rows: int, device: str):
        self.model, self.device = model, device
        self.ids_B, self.positions_B = (torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(2))  # fmt: skip
        self.graphs: dict[int, tuple[Any, Tensor]] = {}

    def __call__(self, longest: int) -> Tensor:
        longest = min(-(-longest // 256) * 256, self.model.length)
        if self.device != "cuda":
            return self.model.decode(self.ids_B, self.positions_B, longest)
        if longest not in self.graphs:
            for _ in range(2):
                self.model.decode(self.ids_B, self.positions_B, longest)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                tokens = self.model.decode(self.ids_B, self.positions_B, longest)
            self.graphs[longest] = graph, tokens
        graph, tokens = self.graphs[longest]
        graph.replay()
        return tokens


@torch.inference_mode()
def loop(run: Run, found: Found) -> None:
    """The plain loop, for as long as its time allows, after the capture of its graphs."""
    prompts, outputs = _prompts(run)
    rows, length = len(prompts), 256 if run.small else 2048
    dtype = torch.bfloat16 if run.device == "cuda" else torch.float32
    model = Plain(_name(run), rows, length, run.device, dtype)
    step = Recorded(model, rows, run.device)
    for longest in range(256, length + 1, 256):
        step(longest)
    model.prefill(0, torch.tensor(prompts[0], device=run.device))
    waiting = list(range(len(prompts)))
    free, at = list(range(rows)), [0] * rows
    left: dict[int, int] = {}
    made, began = 0, time.perf_counter()
    until = began + SHARE * run.left
    while (waiting or left) and time.perf_counter() < until:
        while waiting and free:
            row, which = free.pop(), waiting.pop(0)
            token = model.prefill(row, torch.tensor(prompts[which], device=run.device))
            step.ids_B[row], step.positions_B[row] = token, len(prompts[which])
            left[row], at[row] = outputs[which] - 1, len(prompts[which])
            made += 1
        tokens_B = step(max(at[row] for row in left) + 1)
        step.ids_B.copy_(tokens_B)
        step.positions_B.add_(1).clamp_(max=length - 1)
        tokens_B.tolist()  # bring the tokens to the host, as a server does
        for row in list(left):
            at[row], left[row], made = at[row] + 1, left[row] - 1, made + 1
            if left[row] <= 0:
                del left[row]
                free.append(row)
    _record(found, made, time.perf_counter() - began, sum(outputs))


# ------------------------------------------------------------------------------------ vLLM


def vllm(run: Run, found: Found) -> None:
    """vLLM offline, with its defaults."""
    try:
        library: Any = importlib.import_module("vllm")
    except ImportError as error:
        found["absent"] = str(error)
        return
    if "quire" in str(library.__file__):
        found["absent"] = "the vllm that is installed here is Quire's own"
        return
    found["version"] = library.__version__
    prompts, outputs = _prompts(run)
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), _name(run))
        began = time.perf_counter()
        llm = library.LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=4096,
            max_num_seqs=256,
        )
        found["seconds to Ready"] = round(time.perf_counter() - began, 1)
        params = [
            library.SamplingParams(temperature=0.6, max_tokens=n, ignore_eos=True, detokenize=False)
            for n in outputs
        ]
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        llm.generate(asked[:8], params[:8])
        began = time.perf_counter()
        done = llm.generate(asked, params)
        seconds = time.perf_counter() - began
    _record(found, sum(len(each.outputs[0].token_ids) for each in done), seconds, sum(outputs))
