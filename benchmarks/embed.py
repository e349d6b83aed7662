"""`python -m benchmarks embed`: embedding of 512 texts and reranking of 100 documents, beside other engines.

All engines are in this process and take turns within each round, so that other load on the machine slows all; medians count. An
engine that cannot be imported has a line with the reason. Peers need an environment with sentence-transformers, onnx, onnxruntime and
openvino. fastembed loads models only from a hub, so its procedure (batches of 256 in the given order, ONNX Runtime, the
first token, normalized) runs on an export of the same model. Goal: 1.3 times the best peer, and 70 % of the matrix rate.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import statistics
import string
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import roofline
from benchmarks.result_files import report

SHAPES = {"bge-small": (384, 12, 12, 1536), "bge-base": (768, 12, 12, 3072)}
"""hidden_size, layers, heads, intermediate_size"""
VOCAB, LENGTH = 30522, 512
Run = Callable[[], Any]


def texts(count: int, draw: random.Random) -> list[str]:
    """Texts of 20 to 500 characters."""
    words = [
        "".join(draw.choices(string.ascii_lowercase, k=draw.randint(2, 9))) for _ in range(3000)
    ]
    found = []
    for _ in range(count):
        length, text = draw.randint(20, 500), ""
        while len(text) < length:
            text += draw.choice(words) + " "
        found.append(text[:length])
    return found


def checkpoint(folder: Path, shape: str, reranks: bool, lines: Sequence[str]) -> Path:
    """A random model with a tokenizer, and the files of sentence-transformers."""
    import torch
    from tokenizers import BertWordPieceTokenizer
    from transformers import (
        AutoModel,
        AutoModelForSequenceClassification,
        BertConfig,
        BertTokenizerFast,
    )

    path = folder / f"{shape}{'-reranker' if reranks else ''}"
    hidden, layers, heads, inner = SHAPES[shape]
    config = BertConfig(
        vocab_size=VOCAB, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=inner,
        num_labels=1,
    )  # fmt: skip
    torch.manual_seed(0)
    kind = AutoModelForSequenceClassification if reranks else AutoModel
    kind.from_config(config, dtype=torch.float32).save_pretrained(path)
    words = BertWordPieceTokenizer()
    words.train_from_iterator(lines, vocab_size=VOCAB, show_progress=False)
    words.save(str(path / "words.json"))
    BertTokenizerFast(
        tokenizer_file=str(path / "words.json"), model_max_length=LENGTH
    ).save_pretrained(path)
    if not reranks:
        modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
        entries = [
            {"idx": i, "name": str(i), "path": name, "type": f"sentence_transformers.models.{kind}"}
            for i, (name, kind) in enumerate(modules)
        ]
        pooling = {"word_embedding_dimension": hidden, "pooling_mode_cls_token": True}
        for name, content in (
            ("modules.json", entries),
            ("1_Pooling/config.json", {**pooling, "pooling_mode_mean_tokens": False}),
            ("sentence_bert_config.json", {"max_seq_length": LENGTH, "do_lower_case": False}),
        ):
            (path / name).parent.mkdir(exist_ok=True)
            (path / name).write_text(json.dumps(content), encoding="utf-8")
        (path / "2_Normalize").mkdir(exist_ok=True)
    return path


def quire(path: Path, lines: list[str], query: str | None, **more: Any) -> Run:
    from quire import LLM

    llm = LLM(
        str(path),
        runner="pooling",
        dtype="bfloat16",
        max_num_batched_tokens=8192,
        max_num_seqs=512,
        **more,
    )
    if query is not None:
        return lambda: llm.score(query, lines, use_tqdm=False)
    return lambda: llm.embed(lines, use_tqdm=False)


def sentence_transformers(path: Path, lines: list[str], query: str | None, dtype: str) -> Run:
    import torch
    from sentence_transformers import CrossEncoder, SentenceTransformer

    options = {"dtype": getattr(torch, dtype)}
    if query is not None:
        reranker = CrossEncoder(str(path), device="cpu", model_kwargs=options)
        return lambda: reranker.predict([(query, line) for line in lines], show_progress_bar=False)
    model = SentenceTransformer(str(path), device="cpu", model_kwargs=options)
    return lambda: model.encode(lines, show_progress_bar=False)


def exported(path: Path) -> str:
    """The model as ONNX."""
    import torch
    from transformers import AutoModel

    file = str(path / "model.onnx")
    model = AutoModel.from_pretrained(path, attn_implementation="eager").eval()
    names = ["input_ids", "attention_mask", "token_type_ids"]
    ones = torch.ones(2, 8, dtype=torch.long)
    axes = {name: {0: "batch", 1: "tokens"} for name in names}

    class Hidden(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Any, mask: Any, types: Any) -> Any:
            return self.model(input_ids=ids, attention_mask=mask, token_type_ids=types)[0]

    torch.onnx.export(
        Hidden(), (ones, ones, 0 * ones), file, input_names=names, output_names=["hidden"],
        dynamic_axes={**axes, "hidden": {0: "batch", 1: "tokens"}}, dynamo=False,
    )  # fmt: skip
    return file


def batches(
    path: Path, lines: list[str], size: int, in_order: bool, run: Callable[..., Any]
) -> Run:
    """Tokenizes, pads and computes batches; embeddings of the first tokens, normalized."""
    import numpy as np
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.enable_truncation(LENGTH)
    tokenizer.enable_padding()

    def embed() -> list[Any]:
        ordered = lines if in_order else sorted(lines, key=len, reverse=True)
        found = []
        for first in range(0, len(ordered), size):
            encoded = tokenizer.encode_batch(ordered[first : first + size])
            ids = np.array([each.ids for each in encoded])
            mask = np.array([each.attention_mask for each in encoded])
            hidden = run({"input_ids": ids, "attention_mask": mask, "token_type_ids": 0 * ids})[
                :, 0
            ]
            found.append(hidden / np.linalg.norm(hidden, axis=1, keepdims=True))
        return found

    return embed


def onnx_runtime(path: Path, lines: list[str], query: str | None) -> Run:
    onnxruntime = importlib.import_module("onnxruntime")

    session = onnxruntime.InferenceSession(exported(path), providers=["CPUExecutionProvider"])
    return batches(path, lines, 256, True, lambda inputs: session.run(["hidden"], inputs)[0])


def openvino(path: Path, lines: list[str], query: str | None) -> Run:
    ov = importlib.import_module("openvino")

    model = ov.compile_model(
        ov.convert_model(exported(path)), "CPU", {"PERFORMANCE_HINT": "THROUGHPUT"}
    )
    return batches(path, lines, 32, False, lambda inputs: model(inputs)[0])


EMBED: dict[str, Callable[..., Run]] = {
    "quire": quire,
    "quire int8": partial(quire, quantization="int8"),
    "sentence-transformers bf16": partial(sentence_transformers, dtype="bfloat16"),
    "sentence-transformers f32": partial(sentence_transformers, dtype="float32"),
    "fastembed's procedure (ONNX Runtime)": onnx_runtime,
    "OpenVINO, batches by length": openvino,
}
RERANK = {name: make for name, make in EMBED.items() if name.startswith(("quire", "sentence"))}


def measure(engines: dict[str, Callable[..., Run]], rounds: int, *job: Any) -> dict[str, Any]:
    """By engine: seconds of each round, or why it does not run."""
    runs: dict[str, Run] = {}
    found: dict[str, Any] = {}
    for name, make in engines.items():
        try:
            runs[name] = make(*job)
            runs[name]()
        except Exception as error:
            runs.pop(name, None)
            found[name] = f"{type(error).__name__}: {error}"[:300]
    for _ in range(rounds):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            found.setdefault(name, []).append(round(time.perf_counter() - began, 4))
    return found


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks embed", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, action="append", help="default: all")
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--engines", help="only those whose name begins with one of these, with commas between"
    )
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args(argv)
    wanted = tuple((args.engines or "").split(","))
    draw = random.Random(1)
    lines, rows = texts(args.texts, draw), []
    with tempfile.TemporaryDirectory() as name:
        for shape in args.shape or list(SHAPES):
            for reranks, engines in ((False, EMBED), (True, RERANK)):
                some = lines[:100] if reranks else lines
                chosen = {n: make for n, make in engines.items() if n.startswith(wanted)}
                path = checkpoint(Path(name), shape, reranks, lines)
                job = path, some, lines[-1][:60] if reranks else None
                times = measure(chosen, args.rounds, *job)
                rows.append(_row(shape, reranks, len(some), path, some, times))
                print(_lines(rows[-1]), flush=True)
    rate = roofline.probe("bfloat16").flops_per_s
    command = " ".join(["python -m benchmarks embed", *argv])
    result = {"command": command, "flops_per_s": rate, "workloads": rows}
    page = "\n\n".join([f"Matrix rate: {rate / 1e9:.0f} GFLOP/s.", *map(_lines, rows)])
    report(args.folder, "embed", "Embedding and reranking", result, page)
    return 0


def _row(
    shape: str, reranks: bool, count: int, path: Path, lines: list[str], times: dict[str, Any]
) -> dict[str, Any]:
    from tokenizers import Tokenizer

    hidden, layers, _, inner = SHAPES[shape]
    tokens = [
        len(each.ids)
        for each in Tokenizer.from_file(str(path / "tokenizer.json")).encode_batch(lines)
    ]
    flops = sum(
        2 * layers * (4 * hidden**2 + 2 * hidden * inner + 2 * hidden * n) * n for n in tokens
    )
    medians = {
        name: statistics.median(found) for name, found in times.items() if isinstance(found, list)
    }
    return {
        "workload": f"{shape}, {'rerank' if reranks else 'embed'} {count}", "tokens": sum(tokens), "flops": flops,
        "seconds": times, "median_s": medians,
    }  # fmt: skip


def _lines(row: dict[str, Any]) -> str:
    """A Markdown table of one workload."""
    ours = row["median_s"].get("quire")
    lines = [
        f"## {row['workload']} ({row['tokens']} tokens)",
        "",
        "| engine | s | tokens/s | GFLOP/s | quire is |",
        "|---|---|---|---|---|",
    ]
    for name, found in row["seconds"].items():
        if isinstance(found, str):
            lines.append(f"| {name} | {found} | | | |")
            continue
        seconds = row["median_s"][name]
        ratio = f"{seconds / ours:.2f} x" if ours else ""
        lines.append(
            f"| {name} | {seconds:.3f} | {row['tokens'] / seconds:.0f} | {row['flops'] / seconds / 1e9:.0f} | {ratio} |"
        )
    return "\n".join(lines)
