"""Records and changes the residual stream of a Transformers model, by hooks on its decoder layers while a step runs.

Knows decoder layers. Does not know caches, or what the states are for. No hook stays after the step, so the search for
users' hooks finds none of these (`worker/module_hooks.py`).

Shape suffixes: T tokens of this step, N tokens of one pass, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from quire.errors import Unsupported
from quire.forward_context import ForwardBatch
from quire.layers.decoder import with_added


def decoder_layers(runner: nn.Module, count: int) -> nn.ModuleList:
    """The outermost list of `count` decoder layers, in the order in which a pass calls them.

    Raises:
        Unsupported: there is none.
    """
    for module in runner.modules():
        if not isinstance(module, nn.ModuleList) or len(module) != count:
            continue
        if all(isinstance(layer, GradientCheckpointingLayer) for layer in module):
            return module
    raise Unsupported(
        f"hidden states of inner layers of {type(runner).__name__} (it has no list of {count} decoder layers)",
        "use a model with one list of decoder layers",
    )


class HiddenStateRecorder:
    """Puts the states after some numbers of layers into batches. See `LanguageModel.record_hidden_states`."""

    def __init__(self, layers: nn.ModuleList, after: Collection[int]):
        self.layers, self.last = layers, len(layers) + 1
        self.after = frozenset(after) - {self.last}
        self.records_last = self.last in after

    @contextmanager
    def recording(self, batch: ForwardBatch) -> Iterator[None]:
        """Inside, passes over the batch's tokens, in order, are recorded.

        Raises:
            RuntimeError: the model did not call each of its layers once for each token.
        """
        passes: dict[int, list[Tensor]] = {number: [] for number in self.after}
        hooks = [self._hook(number, states) for number, states in passes.items()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        for number, states in passes.items():
            state_TD = torch.cat(states) if states else torch.empty(0)
            if len(state_TD) not in (batch.num_tokens, len(batch.token_ids_T)):
                raise RuntimeError(
                    f"hidden states of {len(state_TD)} tokens after {number} layers, in a step of {batch.num_tokens}"
                )
            padding = len(batch.token_ids_T) - len(state_TD)
            batch.hidden_states[number] = nn.functional.pad(state_TD, (0, 0, 0, padding))

    def record_last(self, batch: ForwardBatch, hidden_TD: Tensor) -> None:
        """`hidden_TD`: the output of the last norm."""
        if self.records_last:
            batch.hidden_states[self.last] = hidden_TD.clone()

    def _hook(self, number: int, states: list[Tensor]) -> Any:
        if number < len(self.layers):
            layer: nn.Module = self.layers[number]
            return layer.register_forward_pre_hook(partial(_input, states), with_kwargs=True)
        return self.layers[-1].register_forward_hook(partial(_output, states))


@contextmanager
def adding_states(layers: Callable[[], nn.ModuleList], batch: ForwardBatch) -> Iterator[None]:
    """Inside, the model adds the batch's `added_states`. All tokens of the step must be in one pass."""
    if not batch.added_states:
        yield
        return
    own = layers()
    hooks = [own[number - 1].register_forward_hook(partial(_add, number)) for number in batch.added_states]  # fmt: skip
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _add(number: int, layer: nn.Module, args: Any, output: Any) -> Any:
    state_1ND = output[0] if isinstance(output, tuple) else output
    more_1ND = with_added(number, state_1ND[0])[None]
    return (more_1ND, *output[1:]) if isinstance(output, tuple) else more_1ND


def _input(states: list[Tensor], layer: nn.Module, args: Any, options: dict[str, Any]) -> None:
    state_1ND = args[0] if args else options["hidden_states"]
    states.append(state_1ND[0])


def _output(states: list[Tensor], layer: nn.Module, args: Any, output: Any) -> None:
    state_1ND = output[0] if isinstance(output, tuple) else output
    states.append(state_1ND[0])
