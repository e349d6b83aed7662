"""Checkpoint files: which files of a directory are the weights, their sizes, and their tensors one by one.

Knows safetensors, torch's pickles (always read with weights_only: a pickle can run code) and a cache of
numpy files. Does not know models. `weight_files` and `weight_bytes` do not import torch.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.config.checkpoint_quantization import BLOCKS, CODED, CheckpointQuantization
from quire.config.load import LOAD_FORMATS, SAME_LOAD_FORMATS
from quire.config.quantization import HEAD_BYTES, ONLINE
from quire.errors import ConfigError, ModelNotFound, Unsupported
from quire.logging import get_logger
from quire.models.gguf.families import stored_in
from quire.models.gguf.folder import only_model
from quire.models.gguf.header import TYPES, parts_of
from quire.models.gguf.projector import LINK, stored_projector
from quire.models.mistral.tensors import usual_name, usual_tensors
from quire.models.pickled_weights import numpy_copy, pickled
from quire.models.safetensors_header import BITS, header

if TYPE_CHECKING:
    from torch import Tensor

log = get_logger(__name__)

ITEMSIZE = {name: bits / 8 for name, bits in BITS.items()}
ITEMSIZE |= {name: size / elements for name, elements, size in TYPES.values() if elements > 1}
ITEMSIZE |= CODED
FLOATS = ("F64", "F32", "F16", "BF16")
TABLE = re.compile(r"embed|wte|wpe")  # lookup tables, which are not multiplied
RANK = "model-rank-{}-part-*.safetensors"
PICKLES = ("*.bin", "*.pt", "*.pth")
OF_MISTRAL = "consolidated"
SHARD = re.compile(r"-(\d+)-of-(\d+)\.")
AGAIN = "the download is not complete; download the checkpoint again"
HEAD_FILES = ("sparse_linear.pt", "colbert_linear.pt")
"""Layers of BGE-M3 beside the weights of the model."""
NOT_WEIGHTS = (
    "training_args",
    "optimizer",
    "scheduler",
    "rng_state",
    "scaler",
    "adapter_model",
    *HEAD_FILES,
)


# ------------------------------------------------------------------------------------ which files


def weight_files(path: str, load_format: str = "auto") -> tuple[str, list[Path]]:
    """("safetensors", "pt" or "gguf", files). An index file, if there is one, says which files belong together.

    Raises:
        ModelNotFound: no weights in the directory, or a file that the index names is missing.
        ConfigError: load_format is unknown.
    """
    load_format = SAME_LOAD_FORMATS.get(load_format, load_format)
    if load_format not in LOAD_FORMATS:
        raise ConfigError(f"load_format={load_format!r}: choose from {', '.join(LOAD_FORMATS)}")
    root = Path(path)
    if load_format == "sharded_state" and (files := _of_one_rank(root)):
        return "safetensors", files
    if load_format in ("auto", "hf", "safetensors", "dummy"):
        files = _indexed(root, "model.safetensors.index.json") or _single_safetensors(root)
        if files:
            return "safetensors", files
    if load_format in ("auto", "hf", "pt", "npcache", "dummy"):
        files = _indexed(root, "pytorch_model.bin.index.json")
        for pattern in PICKLES if not files else ():
            files = [f for f in sorted(root.glob(pattern)) if not f.name.startswith(NOT_WEIGHTS)]
            if files:
                break
        if files:
            return "pt", files
    if load_format in ("auto", "gguf") and (file := only_model(root)) is not None:
        return "gguf", parts_of(file)
    kinds = {
        "sharded_state": RANK.format(0),
        "safetensors": "*.safetensors",
        "pt": "*.bin, *.pt",
        "npcache": "*.bin, *.pt",
    }
    raise ModelNotFound(
        f"{path} has no weights ({kinds.get(load_format, '*.safetensors, *.bin, *.pt')}); pass --load-format dummy to"
        " use random weights"
    )


def _of_one_rank(root: Path) -> list[Path]:
    """The files of `save_sharded_state` with one rank: the model's tensors, maybe joined, in parts of a limited size."""
    if any(root.glob(RANK.format(1))):
        raise Unsupported(
            f"load_format=sharded_state with {root}, whose weights are split over several ranks",
            "write it with one rank, or serve the checkpoint that it was made from",
        )
    return sorted(root.glob(RANK.format(0)))


def _indexed(root: Path, index: str) -> list[Path]:
    file = root / index
    if not file.is_file():
        return []
    try:
        names = sorted(set(json.loads(file.read_text(encoding="utf-8"))["weight_map"].values()))
        files = [root / name for name in names]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{file} is not a weight index: {error!r}") from None
    if any(part in ("..", "/") for name in names for part in Path(name).parts):
        raise ConfigError(f"{file} refers to files outside its directory")
    missing = [f.name for f in files if not f.is_file()]
    if missing:
        raise ModelNotFound(
            f"{file} refers to {len(files)} files, but {len(missing)} are missing: {', '.join(missing[:5])}; {AGAIN}"
        )
    return files


def _check_numbers(files: list[Path]) -> None:
    """Raises ModelNotFound: names such as model-00001-of-00004.safetensors show that files are missing."""
    found = [match for file in files if (match := SHARD.search(file.name))]
    total = max((int(match[2]) for match in found), default=0)
    if len(found) < total:
        raise ModelNotFound(
            f"{files[0].parent} has {len(found)} of {total} weight files ({found[0].string}, ...); {AGAIN}"
        )


def _single_safetensors(root: Path) -> list[Path]:
    if (root / "model.safetensors").is_file():
        return [root / "model.safetensors"]
    # A link of the hub's cache without its blob is an unfinished download.
    found = [file for file in sorted(root.glob("*.safetensors")) if file.is_file()]
    files = [file for file in found if not file.name.startswith(NOT_WEIGHTS)]
    # Mistral's repositories have the same weights a second time, under other names.
    files = [f for f in files if not f.name.startswith(OF_MISTRAL)] or files
    _check_numbers(files)
    return files


# ------------------------------------------------------------------------------------ sizes


TensorHeader = tuple[str, str, Sequence[int]]
"""Name, element format (as in safetensors_header.BITS) and shape of a tensor in a file."""


def weight_bytes(
    path: str, hf_config: Mapping[str, Any] | None = None, load_format: str = "auto"
) -> int:
    """Bytes of the weights on disk; for dummy weights without files, an estimate from config.json.

    Raises: as `weight_files` and `header`.
    """
    return on_disk(stored_tensors(path, hf_config, load_format))


def on_disk(tensors: Iterable[TensorHeader] | int) -> int:
    """Bytes of these tensors in their files."""
    if isinstance(tensors, int):
        return tensors
    return int(sum(math.prod(shape) * ITEMSIZE.get(kind, 2) for _, kind, shape in tensors))


def in_memory(
    tensors: Iterable[TensorHeader] | int,
    itemsize: int,
    scheme: str | None = None,
    small_head: bool = True,
) -> int:
    """An estimate of the bytes of the loaded weights: floats of `itemsize` bytes; linears and, with `small_head`, the
    head as `scheme` (a key of config/quantization.ONLINE) quantizes them; all else as in the files."""
    if isinstance(tensors, int):
        return tensors
    total, heads, tables = 0.0, 0, 0
    for name, kind, shape in tensors:
        count, is_float = math.prod(shape), kind in FLOATS
        if is_float and len(shape) == 2 and name.endswith("lm_head.weight"):
            heads += count
        elif is_float and len(shape) == 2 and TABLE.search(name):
            tables = max(tables, count)
            total += count * itemsize
        elif scheme is not None and is_float and len(shape) == 2:
            total += count * ONLINE[scheme].bytes_per_weight
        else:
            total += count * (itemsize if is_float else ITEMSIZE.get(kind, 2))
    if scheme is not None and small_head:  # a tied head is quantized to a weight of its own
        return int(total + (heads or tables) * HEAD_BYTES)
    return int(total + heads * itemsize)


def as_loaded(
    tensors: Iterable[TensorHeader] | int,
    stored: CheckpointQuantization | None,
    keeps_codes: bool = False,
) -> Iterable[TensorHeader] | int:
    """The tensors as a model gets them: floats in place of bytes that are decoded while they are read.

    keeps_codes: weights of 4 bits keep their codes where the CPU kernels multiply these.
    """
    if stored is None or isinstance(tensors, int):
        return tensors
    if stored.kinds_in_file:
        sizes = {"F32": "F32", "F16": "F16", **BLOCKS}
        return [(name, sizes.get(kind, "BF16"), shape) for name, kind, shape in tensors]
    if not stored.is_decoded:
        return tensors
    decoded = [scheme for scheme in stored.schemes() if scheme.kind == "decoded"]
    per = max(8 // scheme.bits for scheme in decoded)
    coded = keeps_codes and all(scheme.reader in CODED for scheme in decoded)
    becomes = decoded[0].reader if coded else "BF16"
    return [
        (name, becomes, (*shape[:-1], shape[-1] * per))
        if kind in ("U8", "F8_E4M3") and len(shape) > 1 and "scale" not in name
        else (name, kind, shape)
        for name, kind, shape in tensors
    ]


def stored_tensors(
    path: str, hf_config: Mapping[str, Any] | None = None, load_format: str = "auto"
) -> list[TensorHeader] | int:
    """The tensors in the files, or only their bytes for pickles; for dummy weights without files an estimate.

    Raises: as `weight_files` and `header`.
    """
    try:
        kind, files = weight_files(path, load_format)
    except ModelNotFound:
        if load_format != "dummy" or hf_config is None:
            raise
        return _forecast(hf_config)
    if kind == "gguf":
        return stored_in(files[0]) + stored_projector(Path(path))
    if kind != "safetensors":
        return sum(file.stat().st_size for file in files)
    return [
        (
            usual_name(name) if file.name.startswith(OF_MISTRAL) else name,
            tensor["dtype"],
            tensor["shape"],
        )
        for file in files
        for name, tensor in header(file).items()
    ]


def _forecast(config: Mapping[str, Any]) -> list[TensorHeader]:
    """The tensors of a dense 16-bit decoder with this config."""
    try:
        hidden, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
        heads = int(config["num_attention_heads"])
        head = int(config.get("head_dim") or hidden // heads)
        kv = int(config.get("num_key_value_heads") or heads)
        rows = head * (2 * heads + 2 * kv) + 3 * int(config["intermediate_size"])
        vocab = int(config["vocab_size"])
    except (KeyError, TypeError):
        return []  # an unfamiliar config: the memory is measured after loading
    found: list[TensorHeader] = [("linear", "BF16", (rows, hidden))] * layers
    found.append(("embed_tokens.weight", "BF16", (vocab, hidden)))
    if not config.get("tie_word_embeddings"):
        found.append(("lm_head.weight", "BF16", (vocab, hidden)))
    return found


# ------------------------------------------------------------------------------------ tensors


def tensors(
    path: str,
    load_format: str = "auto",
    hf_config: Mapping[str, Any] | None = None,
    dtype: str = "float32",
    blocks: Container[str] = (),
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every tensor, on the CPU; tensors of safetensors and pt files are views of the mapped file.

    `hf_config`, `dtype`: of the model, which a GGUF file is read for; its blocks become floats of this dtype, except in
    the tensors that `blocks` names.

    Raises: as `weight_files`; ConfigError: a file is damaged.
    """
    kind, files = weight_files(path, load_format)
    if kind == "gguf":
        if hf_config is None:
            what = "a GGUF file through the Transformers backend"
            raise Unsupported(what, "leave --model-impl out")
        from quire.models.gguf.tensors import gguf_tensors

        yield from gguf_tensors(path, hf_config, dtype, blocks)
        return
    if load_format == "npcache":
        yield from numpy_copy(Path(path) / "np", files)
        return
    for file in files:
        found = _safetensors(file) if kind == "safetensors" else pickled(file)
        if file.name.startswith(OF_MISTRAL):
            if hf_config is None:
                what = "Mistral's files through the Transformers backend"
                raise Unsupported(what, "leave --model-impl out")
            found = usual_tensors(found, hf_config)
        yield from found


def tower_tensors(
    path: str, load_format: str, hf_config: Mapping[str, Any], dtype: str
) -> Iterator[tuple[str, Tensor]]:
    """As `tensors`, of the towers beside a language model: those of GGUF models have a file of their own."""
    if (Path(path) / LINK).is_file():
        from quire.models.gguf.tensors import projector_tensors

        return projector_tensors(path, dtype)
    return tensors(path, load_format, hf_config, dtype)


def _safetensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    # Gives a clear error for a truncated file, and prevents a fault on its missing pages.
    header(file)
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is not a dict
                yield name, opened.get_tensor(name)
    except SafetensorError as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
