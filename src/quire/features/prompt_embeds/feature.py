"""PromptEmbedsFeature: prompts may be embeddings in place of tokens (--enable-prompt-embeds).

The frontend checks them (`frontend/prompt_embeddings.py`); they travel as `media` of their request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.config.engine import Resolved
from quire.engine.feature import EngineParts, Feature
from quire.errors import ConfigError
from quire.models.hf_config import TextConfig

if TYPE_CHECKING:
    from quire.worker.build import WorkerParts

ANOTHER = "leave enable_prompt_embeds out, or use another model"


class PromptEmbedsFeature(Feature):
    """A hook in the ranks that embed tokens."""

    name = "prompt_embeds"

    @classmethod
    def enabled(cls, resolved: Resolved) -> bool:
        return resolved.config.model.enable_prompt_embeds

    def begin(self) -> None:
        """Raises ConfigError: the model does not compute from embeddings alone, or generates nothing."""
        if self.resolved.pooling is not None:
            raise ConfigError(f"enable_prompt_embeds: this model pools its prompts; {ANOTHER}")
        if self.resolved.hf_config.get("hidden_size_per_layer_input"):
            raise ConfigError(
                "enable_prompt_embeds: each layer of this model reads token ids (hidden_size_per_layer_input in"
                f" config.json), and embeddings have none; {ANOTHER}"
            )

    def plug_into_engine(self, engine: EngineParts) -> None:
        engine.ready["embedding_size"] = int(TextConfig(self.resolved.hf_config).hidden_size)

    def plug_into_worker(self, parts: WorkerParts) -> None:
        from quire.features.prompt_embeds.hook import PromptEmbedsHook

        if parts.ranks.stage.is_first:
            parts.hooks.append(PromptEmbedsHook(parts.rows, self.resolved.dtype))
