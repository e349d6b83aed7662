"""A GPU stand-in on the host: its tensors report a CUDA device, and raise or record an event where a GPU would fail or block.

Their numbers are the host's own, so kernels run in Triton's interpreter. Three things are as on a card:

    two places      an operation on tensors of both is refused
    waiting         what makes the host wait until the device is idle is noted in `waits`, with where it was asked for
    later           a copy to the host that was only queued holds garbage until an event after it was waited for
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter, tree_map

PLACE = torch.device("cuda", 0)
ASKING = {
    "item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__", "__contains__", "cpu",
    "nonzero", "masked_select", "unique", "equal", "allclose",
}  # fmt: skip
MAKING = {"tensor", "as_tensor", "new_tensor"}  # from numbers of the host

waits: list[str] = []
queued: list[tuple[Tensor, Tensor]] = []


class Card(Tensor):
    """See above."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return call(func, args, kwargs or {})


class Mode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return call(func, args, kwargs or {})


class Event:
    """In place of torch.Event."""

    def __init__(self, device: Any = None, **kwargs: Any):
        self.copies: list[tuple[Tensor, Tensor]] = []

    def record(self, stream: Any = None) -> None:
        self.copies = queued[:]

    def synchronize(self) -> None:
        with torch._C.DisableTorchFunction(), torch.inference_mode():
            for into, source in self.copies:
                into.copy_(source)
                queued[:] = [pair for pair in queued if pair[0] is not into]
        self.copies = []


def plain(x: Any) -> Any:
    """The same memory, as what it is."""
    if not isinstance(x, Card):
        return x
    with torch._C.DisableTorchFunction():
        return x.as_subclass(Tensor)


def here(x: Any) -> Any:
    if not isinstance(x, Tensor) or isinstance(x, Card) or x.is_meta:
        return x
    with torch._C.DisableTorchFunction():
        return x.as_subclass(Card)


def noted(why: str) -> None:
    frames = traceback.extract_stack()[:-2]
    where = next((f for f in reversed(frames) if "/quire/" in f.filename), frames[-1])
    waits.append(f"{why} in {where.filename.rpartition('/quire/')[2]}:{where.lineno} {where.line}")


def _is_here(x: Any) -> bool | None:
    """Is this the card; None: it names no place."""
    if isinstance(x, str | torch.device):
        return torch.device(x).type == "cuda"
    return None


def call(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    name = getattr(func, "__name__", str(func))
    if name == "__get__" and func.__self__ in (Tensor.device, Tensor.is_cuda):
        if isinstance(args[0], Card):
            return PLACE if func.__self__ is Tensor.device else True
        return _run(func, args, kwargs)
    kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
    if name in ("to", "cpu"):
        return _moved(func, name, args, kwargs)
    if made_here := bool(_is_here(kwargs.get("device"))):
        kwargs["device"] = "cpu"
    tensors = [x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)]
    cards = [x for x in tensors if isinstance(x, Card)]
    if name == "_has_compatible_shallow_copy_type":  # asked by nn.Module.to
        return len(cards) != 1
    if (cards and name in ASKING) or ((cards or made_here) and name in MAKING):
        noted(name)
    if cards and name in ("__getitem__", "__setitem__", "index_put_"):
        _look_at_index(*args)
    elif cards and name == "copy_":
        if not (kwargs.get("non_blocking") and isinstance(args[0], Card)) and len(cards) < 2:
            noted(name)
    elif cards and not name.startswith("__"):
        _same_place(name, tensors)
    made = _run(func, args, kwargs)
    return tree_map(here, made) if made_here or (cards and name not in ASKING) else made


def _run(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    with torch._C.DisableTorchFunction():
        if getattr(func, "__name__", "") == "__set__":  # of `.data`: the class is part of it
            return func(*args, **kwargs)
        return func(*tree_map(plain, args), **tree_map(plain, kwargs))


def _same_place(name: str, tensors: Sequence[Any]) -> None:
    """Numbers of the host may be beside tensors of the card, and nothing else."""
    if any(not isinstance(x, Card) and x.dim() and not x.is_meta for x in tensors):
        raise RuntimeError(f"{name}: tensors of the card and of the host")


def _look_at_index(into: Tensor, index: Any, *values: Any) -> None:
    for x in tree_iter(index):
        if isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8):
            noted("an index that is a mask")
        if isinstance(x, Tensor) and isinstance(into, Card) != isinstance(x, Card):
            noted("an index of the other place")
    _same_place("an index", [into, *(x for x in values if isinstance(x, Tensor))])


def _moved(func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`to` and `cpu`: a place, a format or both; or a tensor that has them."""
    source, *words = args
    told = [x.device if isinstance(x, Tensor) else x for x in (*words, kwargs.get("device"))]
    if any(isinstance(x, str | torch.device) and torch.device(x).type == "meta" for x in told):
        return _run(func, args, kwargs)
    was = isinstance(source, Card)
    to_here = next((p for x in told if (p := _is_here(x)) is not None), was and name != "cpu")
    dtypes = [x.dtype if isinstance(x, Tensor) else x for x in (*words, kwargs.get("dtype"))]
    made = plain(source)
    for dtype in dtypes:
        if isinstance(dtype, torch.dtype):
            made = _run(Tensor.to, (made, dtype), {})
    if to_here == was:
        return here(made) if was else made
    if not kwargs.get("non_blocking"):
        noted(name)
    with torch._C.DisableTorchFunction():
        made = made.clone()
    if to_here:
        return here(made)
    if not kwargs.get("non_blocking"):
        return made
    with torch._C.DisableTorchFunction():
        later = torch.full_like(made, -77)
    queued.append((later, made))
    return later


@contextmanager
def installed(monkeypatch: Any) -> Iterator[None]:
    """Inside, there is such a card."""
    from triton.runtime import interpreter

    launch = interpreter.GridExecutor.__call__

    def launched(self: Any, *args: Any, **kwargs: Any) -> Any:
        for x in (*args, *kwargs.values()):
            if isinstance(x, Tensor) and not isinstance(x, Card):
                raise RuntimeError(f"{self.fn.__name__}: a tensor of the host")
        with torch._C.DisableTorchFunction():
            return launch(self, *map(plain, args), **{k: plain(v) for k, v in kwargs.items()})

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launched)
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *args: noted("synchronize"))
    waits.clear()
    queued.clear()
    with Mode():
        yield


class Stream:
    """Everything is done at once."""

    def wait_stream(self, stream: Any) -> None:
        pass

    wait_event = wait_stream


class Timed(Event):
    """Of torch.cuda."""

    def elapsed_time(self, other: Any) -> float:
        return 1.0


class Again:
    """A recorded step that runs again: from the same memory, into the same memory."""

    def __init__(self, run: Callable[[], Tensor]):
        self.run, self.output = run, run()

    def replay(self) -> None:
        self.output.copy_(self.run())


class Graph:
    """What is recorded was run; it is not run again."""

    def replay(self) -> None:
        pass


@contextmanager
def chosen(monkeypatch: Any) -> Iterator[None]:
    """Inside, QUIRE_DEVICE=cuda is this card, of 64 GiB."""
    from quire.platforms import cuda, detect

    stream, size = Stream(), 64 << 30
    for name, stand_in in {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "init": lambda: None,
        "mem_get_info": lambda device: (size, size),
        "memory_reserved": lambda device: 0,
        "memory_allocated": lambda device: 0,
        "get_device_properties": lambda device: SimpleNamespace(
            name="A card", total_memory=size, multi_processor_count=2
        ),
        "current_stream": lambda *args: stream,
        "set_stream": lambda stream: None,
        "stream": lambda stream: nullcontext(),
        "Stream": lambda *args: stream,
        "Event": lambda **kwargs: Timed(),
        "graph": lambda *args, **kwargs: nullcontext(),
        "graph_pool_handle": lambda: 0,
        "CUDAGraph": Graph,
        "synchronize": lambda *args: None,
        "empty_cache": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: None)
    monkeypatch.setattr(detect, "cuda_device", lambda: detect.CudaDevice("A card", size, (9, 0)))
    monkeypatch.setattr(detect, "cuda_missing", lambda: "")
    monkeypatch.setattr(cuda.CudaGraphCapturer, "capture", lambda self, run: Again(run))
    with installed(monkeypatch):
        yield
