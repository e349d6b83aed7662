"""The waiting requests, in the order in which they are considered.

Knows `Request.order`: (priority, arrival) under the priority policy, (0, arrival) under first come first
served; so a request that was preempted goes back to its own place in either.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

from quire.scheduler.request import Request


def _backwards(request: Request) -> tuple[int, int]:
    priority, number = request.order
    return -priority, -number


class WaitingQueue:
    """Kept sorted backwards, so that the first in line is popped from the end at no cost.

    Another order is a class with these methods (`fair_queue.py`); the scheduler asks it and does not know why.
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self.num_tokens = 0  # prompt tokens of all who wait

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """First in line first. Removing the request at hand while iterating is allowed."""
        return reversed(self._requests)

    def charge(self, request: Request, num_tokens: int) -> None:
        """A step computes so many tokens of this request."""

    def ended(self, request: Request) -> None:
        """A request that was added once is gone for good."""

    def gives_way(self, first: Request, running: Sequence[Request]) -> Request | None:
        """Who of `running` is to be set back so that `first`, the first in line, finds room."""
        return None

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=_backwards)
        self.num_tokens += request.num_prompt

    def remove(self, request: Request) -> None:
        index = bisect_left(self._requests, _backwards(request), key=_backwards)
        if index == len(self._requests) or self._requests[index] is not request:
            raise KeyError(f"request {request.id} does not wait")
        del self._requests[index]
        self.num_tokens -= request.num_prompt
