"""`reset_mm_cache` and `reset_encoder_cache` of `LLM` and `AsyncLLM`, as vLLM has them: forget pictures.

Knows the frontend's cache of processed pictures, and a function of the engine by name (`features/media`).
"""

from __future__ import annotations

from typing import Any

from quire.frontend.media.prompt_reader import media_inputs

RESET = "reset_encoder_cache"


class MediaCalls:
    """A base class of `LLM`."""

    front: Any
    client: Any

    def reset_mm_cache(self) -> None:
        """Forget the processed pictures."""
        if (media := media_inputs(self.front)) is not None:
            media.cache.clear()

    def reset_encoder_cache(self) -> None:
        """Forget the pictures that the vision tower has encoded."""
        if media_inputs(self.front) is not None:
            self.client.call(RESET)


class AsyncMediaCalls:
    """A base class of `AsyncLLM`."""

    front: Any
    call: Any

    async def reset_mm_cache(self) -> None:
        """As `MediaCalls.reset_mm_cache`."""
        MediaCalls.reset_mm_cache(self)  # type: ignore[arg-type]

    async def reset_encoder_cache(self) -> None:
        """As `MediaCalls.reset_encoder_cache`."""
        if media_inputs(self.front) is not None:
            await self.call(RESET)
