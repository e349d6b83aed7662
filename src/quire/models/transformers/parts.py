"""Finds the parts of a Transformers model: its trunk, the text model inside a wrapper, hidden states, logits.

Knows modules and outputs of Transformers. Does not know batches, caches or attention.

Shape suffixes: T tokens, S positions that need logits, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from quire.errors import Unsupported


@contextmanager
def forward_replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Inside, the module's `forward` is this function."""
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        del module.__dict__["forward"]


def find_trunk(model: PreTrainedModel) -> tuple[nn.Module, Any]:
    """The submodule from which the model's forward gets hidden states, and a sample of its output.

    Raises:
        Unsupported: there is none: the model does not consist of a trunk and a head.
    """
    depth, found = 0, []

    def enter(*_: Any) -> None:
        nonlocal depth
        depth += 1

    def leave(module: nn.Module, _args: Any, output: Any) -> None:
        nonlocal depth
        depth -= 1
        if depth == 0 and not isinstance(output, Tensor) and hidden_of(output) is not None:
            found.append((module, output))

    hooks = []
    for module in model.modules():
        if module is not model:
            hooks += [
                module.register_forward_pre_hook(enter),
                module.register_forward_hook(leave),
            ]
    try:
        ids_1T = torch.full((1, 3), min(5, vocab_size(model) - 1), device=model.device)
        model(input_ids=ids_1T, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    if not found:
        raise Unsupported(
            f"{type(model).__name__} through the Transformers backend (it has no separate decoder)",
            "use another checkpoint",
        )
    return found[0]


def runner_of(model: PreTrainedModel, trunk: nn.Module) -> nn.Module:
    """The module to call with text: the trunk, or in a wrapper with towers the language model inside it."""
    inner = model.get_decoder()
    if inner is not trunk and any(inner is module for module in trunk.modules()):
        return inner
    return trunk


def drop_towers(model: PreTrainedModel, runner: nn.Module) -> list[str]:
    """Free the weights of a wrapper that only images and sounds use; returns the names of the dropped modules.

    Keeps the text module and everything that contains it or is inside it, and the head.
    """
    if runner is model or not any(part is runner for part in model.modules()):
        return []
    keep = {*runner.modules(), model.get_output_embeddings(), model.get_input_embeddings()}
    dropped = []

    def walk(module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            inside = f"{path}{name}"
            if child in keep:
                continue
            if keep.isdisjoint(child.modules()):
                if any(True for _ in child.parameters()):
                    _empty(child)
                    dropped.append(inside)
            else:
                walk(child, f"{inside}.")

    if model.config.get_text_config(decoder=True) is not model.config:
        walk(model, "")
    return dropped


def _empty(tower: nn.Module) -> None:
    """Replace the tower's parameters by empty ones; on "meta" they would report a wrong device for the model."""
    for part in tower.modules():
        for name, weight in list(part.named_parameters(recurse=False)):
            part.register_parameter(name, nn.Parameter(weight.new_empty(0), requires_grad=False))


def hidden_of(output: Any) -> Any:
    if isinstance(output, tuple):
        return (
            output[0] if output and isinstance(output[0], Tensor) and output[0].ndim == 3 else None
        )
    return getattr(output, "last_hidden_state", None)


def like(sample: Any, hidden_1SD: Tensor) -> Any:
    if isinstance(sample, tuple):
        return (hidden_1SD,)
    return type(sample)(last_hidden_state=hidden_1SD)


def logits_of(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output.logits


def vocab_size(model: PreTrainedModel) -> int:
    return int(model.config.get_text_config(decoder=True).vocab_size)
