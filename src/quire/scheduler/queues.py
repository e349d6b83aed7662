"""The waiting requests, in the order in which they are considered.

Knows `Request.order`: (priority, arrival) under the priority policy, (0, arrival) under first come first
served; so a request that was preempted goes back to its own place in either.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from quire.scheduler.request import Request


def _backwards(request: Request) -> tuple[int, int]:
    priority, number = request.order
    return -priority, -number


class WaitingQueue:
    """Kept sorted backwards, so that the first in line is popped from the end at no cost."""

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self.num_tokens = 0  # prompt tokens of all who wait

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """First in line first. Removing the request at hand while iterating is allowed."""
        return reversed(self._requests)

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=_backwards)
        self.num_tokens += request.num_prompt

    def remove(self, request: Request) -> None:
        index = bisect_left(self._requests, _backwards(request), key=_backwards)
        if index == len(self._requests) or self._requests[index] is not request:
            raise KeyError(f"request {request.id} does not wait")
        del self._requests[index]
        self.num_tokens -= request.num_prompt
