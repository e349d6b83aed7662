"""The header of a GGUF file: its metadata, and the place, type and shape of each tensor.

Knows the format (version 2 and 3), and distrusts it: every count and length is compared with the bytes that are left before
memory is taken for it, so that a file costs at most as much memory as its header is long. Does not know what the values mean.

    "GGUF" | version | tensors | pairs | pairs: key, type, value | tensors: name, shape, type, offset | padding | data

Source: the specification in ggml-org/ggml, docs/gguf.md.
"""

from __future__ import annotations

import functools
import math
import re
import struct
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, NamedTuple

from quire.errors import ConfigError, ModelNotFound, Unsupported

MAGIC = b"GGUF"
LONGEST_HEADER = 64 << 20
MOST_TENSORS, MOST_PAIRS, MOST_DIMS, DEEPEST = 1 << 17, 1 << 16, 4, 2
LARGEST_ALIGNMENT = 1 << 16
SPLIT = re.compile(r"^(.*)-(\d{5})-of-(\d{5})\.gguf$")

NUMBERS = dict(enumerate("B b H h I i f ?".split())) | {10: "Q", 11: "q", 12: "d"}
"""Type of a value -> its letter in `struct`."""
STRING, ARRAY = 8, 9
LENGTH = struct.Struct("<Q")

TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip
"""Type of a tensor -> its name, and the elements and bytes of a block."""


class GgufTensor(NamedTuple):
    """A tensor in a file. `shape`: outermost dimension first; blocks lie along the last. `start`: in bytes of the file."""

    name: str
    kind: str
    shape: tuple[int, ...]
    start: int
    nbytes: int
    file: Path


@dataclass(frozen=True)
class GgufHeader:
    """`metadata`: key -> number, string or list. `tensors`: of all files of a model."""

    files: tuple[Path, ...]
    metadata: dict[str, Any]
    tensors: tuple[GgufTensor, ...]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    def get(self, key: str, default: Any = None) -> Any:
        """A value of the architecture's own keys."""
        return self.metadata.get(f"{self.architecture}.{key}", default)


def read_header(file: Path, tokenizer: bool = True) -> GgufHeader:
    """The header of a model, from its only file or from the first of its parts.

    `tokenizer`: with its lists, of 300,000 texts in a usual file; else the metadata lack them.

    Raises:
        ConfigError: a file is damaged; the message names it and the byte.
        ModelNotFound: a part is missing. Unsupported: an old or a big-endian file.
    """
    files = parts_of(file)
    read = [_read(each, tokenizer) for each in files]
    declared = read[0].metadata.get("split.count", 0)
    if isinstance(declared, int) and declared > len(files):
        raise ModelNotFound(
            f"{file} is one of {declared} parts; keep their names, such as model-00001-of-{declared:05}.gguf"
        )
    tensors = tuple(tensor for each in read for tensor in each.tensors)
    names = {tensor.name for tensor in tensors}
    if len(names) < len(tensors):
        raise ConfigError(f"{files[0]} has two tensors of one name; download it again")
    return GgufHeader(tuple(files), read[0].metadata, tensors)


def parts_of(file: Path) -> list[Path]:
    """The files of the model that `file` belongs to, in order.

    Raises:
        ModelNotFound: a part is missing.
    """
    if (match := SPLIT.match(file.name)) is None:
        return [file]
    total = int(match[3])
    if not 1 <= int(match[2]) <= total or total > 4096:
        raise ModelNotFound(f"{file}: there is no such part; rename the file as it was downloaded")
    files = [file.with_name(f"{match[1]}-{i + 1:05}-of-{match[3]}.gguf") for i in range(total)]
    if missing := [each.name for each in files if not each.is_file()]:
        some = ", ".join(missing[:5])
        raise ModelNotFound(
            f"{file} is one of {total} parts, but {len(missing)} are missing: {some}; download them into {file.parent}"
        )
    return files


def _read(file: Path, tokenizer: bool) -> GgufHeader:
    try:
        about = file.stat()
        read = _parsed if tokenizer else _parsed_once
        return read(file, about.st_size, about.st_mtime_ns, tokenizer)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None


def _parsed(file: Path, size: int, changed_ns: int, tokenizer: bool) -> GgufHeader:
    """`size` and `changed_ns` of the file are also keys of `_parsed_once`, so that a changed file is read again."""
    if size < 24:
        raise ConfigError(f"{file} is not a GGUF file: it has {size} bytes")
    with file.open("rb") as opened, mmap(opened.fileno(), size, access=ACCESS_READ) as data:
        return _HeaderReader(file, data, size, tokenizer).header()


_parsed_once = functools.lru_cache(_parsed)
"""A start needs the tensors of a file four times. Headers with a tokenizer are not kept, for their size."""


class _HeaderReader:
    """Reads values one after the other; `offset`: the next byte. `keeps`: whether lists of the current key are returned whole."""

    def __init__(self, file: Path, data: mmap, size: int, tokenizer: bool):
        self.file, self.data, self.size, self.tokenizer = file, data, size, tokenizer
        self.keeps = True
        self.limit, self.offset = min(size, LONGEST_HEADER), 0

    def wrong(self, why: str) -> ConfigError:
        return ConfigError(
            f"{self.file} is not a complete GGUF file: {why} (byte {self.offset}); download it again"
        )

    def take(self, count: int) -> bytes:
        if count > self.limit - self.offset:
            where = "file" if self.limit == self.size else f"first {LONGEST_HEADER >> 20} MiB"
            raise self.wrong(f"a value of {count} bytes ends beyond the {where}")
        found = self.data[self.offset : self.offset + count]
        self.offset += count
        return found

    def number(self, letter: str) -> Any:
        return struct.unpack("<" + letter, self.take(struct.calcsize("<" + letter)))[0]

    def string(self) -> str:
        return self.take(self.number("Q")).decode("utf-8", "replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self.array(depth)
        if kind not in NUMBERS:
            raise self.wrong(f"a value has the unknown type {kind}")
        return self.number(NUMBERS[kind])

    def array(self, depth: int) -> list[Any]:
        kind, count = self.number("I"), self.number("Q")
        if depth >= DEEPEST:
            raise self.wrong(f"arrays are nested more than {DEEPEST} deep")
        if kind in NUMBERS:
            letter = NUMBERS[kind]
            room = (self.limit - self.offset) // struct.calcsize("<" + letter)
            if count > room:
                raise self.wrong(f"an array of {count} values ends beyond the file")
            each = f"<{count}{letter}"
            return list(struct.unpack(each, self.take(struct.calcsize(each))))
        if kind not in (STRING, ARRAY) or count > (self.limit - self.offset) // 8:
            raise self.wrong(f"an array claims {count} values of type {kind}")
        if kind == STRING:
            return self.strings(count)
        return [self.value(kind, depth + 1) for _ in range(count)]

    def strings(self, count: int) -> list[str]:
        """Read `count` texts, or pass over them and return none. One loop without calls: a vocabulary has 150,000 texts."""
        length, data, end, limit = LENGTH.unpack_from, self.data, self.offset, self.limit
        found: list[str] = []
        for _ in range(count):
            start = end + LENGTH.size
            if start > limit or (end := start + length(data, end)[0]) > limit:
                raise self.wrong("a list of texts ends beyond the file")
            if self.keeps:
                found.append(data[start:end].decode("utf-8", "replace"))
        self.offset = end
        return found

    def header(self) -> GgufHeader:
        if self.take(4) != MAGIC:
            self.offset = 0
            raise self.wrong("it does not begin with GGUF")
        version = self.number("I")
        if version not in (2, 3):
            what = "big-endian" if version in (2 << 24, 3 << 24) else f"version {version}"
            raise Unsupported(
                f"{self.file} ({what} GGUF)", "convert it with llama.cpp, which writes version 3"
            )
        num_tensors, num_pairs = self.number("Q"), self.number("Q")
        if num_tensors > MOST_TENSORS or num_pairs > MOST_PAIRS:
            raise self.wrong(f"it claims {num_tensors} tensors and {num_pairs} values")
        metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self.string()
            self.keeps = self.tokenizer or not key.startswith("tokenizer.")
            value = self.value(self.number("I"))
            if self.keeps or not isinstance(value, list):
                metadata[key] = value
        found = [self.tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= LARGEST_ALIGNMENT:
            raise self.wrong(f"general.alignment is {str(alignment)[:40]}")
        start = -(-self.offset // alignment) * alignment
        return GgufHeader((self.file,), metadata, tuple(self.place(each, start) for each in found))

    def tensor(self) -> GgufTensor:
        name, dims = self.string(), self.number("I")
        if dims > MOST_DIMS:
            raise self.wrong(f"tensor {name[:80]!r} has {dims} dimensions")
        shape = tuple(self.number("Q") for _ in range(dims))[::-1]
        kind, offset = self.number("I"), self.number("Q")
        if kind not in TYPES:
            raise self.wrong(f"tensor {name[:80]!r} has the unknown type {kind}")
        label, elements, size = TYPES[kind]
        count = math.prod(shape)
        if count >= 1 << 44 or (shape or (0,))[-1] % elements:
            raise self.wrong(f"tensor {name[:80]!r} of type {label} has the shape {list(shape)}")
        return GgufTensor(name, label, shape, offset, count // elements * size, self.file)

    def place(self, tensor: GgufTensor, start: int) -> GgufTensor:
        """The tensor with its offset in the file."""
        offset = start + tensor.start
        if offset + tensor.nbytes > self.size:
            raise ConfigError(
                f"{self.file} is truncated: tensor {tensor.name[:80]!r} ends at byte {offset + tensor.nbytes}, but the file has"
                f" {self.size}; download it again"
            )
        return tensor._replace(start=offset)
