"""LoRA adapters on the modules of a Transformers model: a forward hook adds them to a module's output.

Knows modules. Does not know which adapters are loaded.

Shape suffixes: T tokens, O outputs.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from quire.forward_context import current_adapters
from quire.layers.lora import Place
from quire.ops.lora import LoraTable, lora, lora_lookup


class ModuleTarget:
    """A linear layer or a table; see `Target` (layers/lora.py)."""

    def __init__(self, module: nn.Module):
        weight: Any = module.weight
        self.module, self.is_table = module, isinstance(module, nn.Embedding)
        stored_as_inputs = self.is_table or isinstance(module, Conv1D)
        self.num_in, self.num_out = weight.shape if stored_as_inputs else weight.shape[::-1]
        self.transposed = stored_as_inputs
        self.table: LoraTable | None = None

    @property
    def bias(self) -> Any:
        return getattr(self.module, "bias", None)

    @property
    def lora(self) -> LoraTable | None:
        return self.table

    @lora.setter
    def lora(self, table: LoraTable | None) -> None:
        if self.table is None:
            self.module.register_forward_hook(self._add)
        self.table = table

    def rows(self, first: int, last: int) -> Tensor:
        """Rows [first, last) of the weight [O, I], as floats."""
        weight: Any = self.module.weight
        part: Tensor = weight[:, first:last].T if self.transposed else weight[first:last]
        return part.float()

    def _add(self, _module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        y_TO = output.reshape(-1, self.num_out)
        numbers_T = current_adapters(y_TO)
        if numbers_T is None or self.table is None:
            return None
        if self.is_table:
            return lora_lookup(args[0].reshape(-1), y_TO, numbers_T, self.table).view_as(output)
        x_TI = args[0].reshape(-1, self.num_in)
        return lora(x_TI, y_TO, numbers_T, self.table).view_as(output)


def places_of(model: nn.Module) -> dict[str, Place]:
    """By module name: where adapters may be applied. Not in experts, which compute some tokens of a step, and not in tables
    that scale what they give."""
    found = {}
    for name, module in model.named_modules():
        if type(module) not in (nn.Linear, Conv1D, nn.Embedding) or ".experts." in name:
            continue
        if module.weight.numel():
            target = ModuleTarget(module)
            found[name] = Place(target, 0, target.num_out, None if target.is_table else target.rows)
    return found
