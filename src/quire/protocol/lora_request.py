"""LoRARequest: the adapter that a request names in a Python program, as vLLM has it."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.protocol.validators import wrong


class LoRARequest(msgspec.Struct, omit_defaults=True):
    """`LLM.generate(prompts, lora_request=LoRARequest("sql", 1, "/adapters/sql"))`

    Two are equal if their names are.

    Raises:
        ValidationError: a field is missing or has a wrong type; `parameter` names it.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    """A directory, or a hub id."""
    base_model_name: str | None = None
    """For the model card: the name of the model that it belongs to."""
    load_inplace: bool = False
    """Read the files again if the adapter is loaded; requests that run keep the old weights."""
    is_3d_lora_weight: bool = False
    """Accepted; the tensors in the file say how experts are stored."""

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise wrong("lora_name", self.lora_name, "a name")
        if type(self.lora_int_id) is not int or self.lora_int_id < 1:
            raise wrong("lora_int_id", self.lora_int_id, "a whole number of at least 1")
        if not isinstance(self.lora_path, str) or not self.lora_path:
            raise wrong("lora_path", self.lora_path, "a directory or a hub id")

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def path(self) -> str:
        return self.lora_path

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, LoRARequest) and self.lora_name == other.lora_name

    def __hash__(self) -> int:
        return hash(self.lora_name)
