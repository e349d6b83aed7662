"""WaitingQueue: the waiting requests, in the order in which the scheduler considers them.

Knows `Request.order`: (priority, arrival time, number), where the priority is 0 under first come, first served. So a
preempted request returns to its own place under either policy, and so does the next step of a beam search, which has
the arrival time of its search.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

from quire.scheduler.request import Request


def _backwards(request: Request) -> tuple[int, float, int]:
    priority, arrived, number = request.order
    return -priority, -arrived, -number


class WaitingQueue:
    """A list in reverse order, so that removing the first request from the end is cheap.

    A subclass may define another order (`features/fair_share`); the scheduler uses only these methods.
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self.num_tokens = 0  # prompt tokens of all waiting requests

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """Requests in queue order. The current request may be removed during the iteration."""
        return reversed(self._requests)

    def charge(self, request: Request, num_tokens: int) -> None:
        """A step computes num_tokens of this request."""

    def ended(self, request: Request) -> None:
        """The request has ended; `add` will not get it again."""

    def victim_for(self, first: Request, running: Sequence[Request]) -> Request | None:
        """Which of `running` the scheduler must preempt so that `first`, the first waiting request, gets a row."""
        return None

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=_backwards)
        self.num_tokens += request.num_prompt

    def remove(self, request: Request) -> None:
        index = bisect_left(self._requests, _backwards(request), key=_backwards)
        if index == len(self._requests) or self._requests[index] is not request:
            raise KeyError(f"request {request.id} is not waiting")
        del self._requests[index]
        self.num_tokens -= request.num_prompt
