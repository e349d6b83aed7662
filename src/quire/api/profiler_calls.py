"""`start_profile` and `stop_profile` of `LLM` and `AsyncLLM`, as vLLM has them: record steps of the workers (`profiler_config`).

Knows two functions of the workers by name (`features/profiler`).
"""

from __future__ import annotations

from typing import Any


class ProfilerCalls:
    """A base class of `LLM`."""

    collective_rpc: Any

    def start_profile(
        self, profile_prefix: str | None = None, delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:  # fmt: skip
        """Record from the next step on; without an effect while a recording is in progress.

        Raises:
            ValidationError: there is no `profiler_config`, or a value is out of its range.
        """
        self.collective_rpc("start_profile", args=(profile_prefix, delay_iterations, max_iterations))  # fmt: skip

    def stop_profile(self) -> None:
        """End the recording; each worker writes its trace."""
        self.collective_rpc("stop_profile")


class AsyncProfilerCalls:
    """A base class of `AsyncLLM`."""

    collective_rpc: Any

    async def start_profile(
        self, profile_prefix: str | None = None, delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:  # fmt: skip
        """As `ProfilerCalls.start_profile`."""
        await self.collective_rpc("start_profile", args=(profile_prefix, delay_iterations, max_iterations))  # fmt: skip

    async def stop_profile(self) -> None:
        """As `ProfilerCalls.stop_profile`."""
        await self.collective_rpc("stop_profile")
