"""The engine's functions of adapters, without weights: a directory is right if it has adapter_config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.engine.core import EngineCore
from quire.errors import ValidationError
from quire.protocol.output import EngineOutput
from quire.protocol.request import EngineRequest


class ScriptedAdapters:
    """Plugs into a core; `sent` has the adapter of every request."""

    def __init__(self, core: EngineCore):
        self.rows: dict[str, dict[str, Any]] = {}
        self.loads = self.lists = 0
        self.resolved_for: dict[str, str] = {}
        """Name -> API key, of the names that a resolver found."""
        self.pinned: set[str] = set()
        self.sent: list[str | None] = []
        names = ("load_lora", "unload_lora", "list_loras", "find_lora", "pin_lora")
        core.functions |= {name: getattr(self, name) for name in names}
        self._add = core.scheduler.add
        core.scheduler.add = self._checked  # type: ignore[method-assign]

    def _checked(self, received: EngineRequest) -> EngineOutput | None:
        self.sent.append(received.adapter)
        if received.adapter is not None and received.adapter not in self.rows:
            why = f"The model `{received.adapter}` does not exist: no LoRA adapter of that name is loaded"
            return EngineOutput(received.id, [], "error", None, why, "invalid", client=received.client)  # fmt: skip
        return self._add(received)

    def load_lora(
        self, name: str, path: str, load_inplace: bool = False, base_model_name: str | None = None,
        if_absent: bool = False, resolved_for: str | None = None,
    ) -> str:  # fmt: skip
        there = self.rows.get(name)
        if there is not None and if_absent and there["path"] == path and not load_inplace:
            return "version"
        if there is not None and not load_inplace:
            raise ValidationError(
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set"
                " 'load_inplace' to True."
            )
        if not Path(path).is_dir():
            raise ValidationError(f"No adapter found for {path}")
        if not (Path(path) / "adapter_config.json").is_file():
            raise ValidationError("adapter_config.json is missing: pass a directory of PEFT")
        self.loads += 1
        if resolved_for is not None:
            self.resolved_for[name] = resolved_for
        self.rows[name] = {
            "name": name, "path": path, "version": "version", "base_model_name": base_model_name, "rank": 8, "bytes": 100,
            "state": "ready", "is_resolved": resolved_for is not None,
        }  # fmt: skip
        return "version"

    def unload_lora(self, name: str) -> bool:
        return self.rows.pop(name, None) is not None

    def find_lora(self, name: str) -> dict[str, Any] | None:
        return self.rows.get(name)

    def list_loras(self) -> list[dict[str, Any]]:
        self.lists += 1
        return list(self.rows.values())

    def pin_lora(self, name: str) -> bool:
        self.pinned.add(name)
        return name in self.rows
