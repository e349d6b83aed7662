"""WaitingQueue: the waiting requests, in the order in which the scheduler considers them.

Knows `Request.order`: (priority, arrival time, number), where the priority is 0 under first come, first served. So a
preempted request returns to its own place under either policy. A request that continues earlier ones is considered
early too, if the frontend gives it their arrival time.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

from quire.scheduler.request import Request


def _backwards(request: Request) -> tuple[int, float, int]:
    priority, arrived, number = request.order
    return -priority, -arrived, -number


class WaitingQueue:
    """The policy of the order: which request is admitted next, and which is preempted. The scheduler uses only these methods.

    A joint: a feature gives the scheduler a subclass that defines another order (decision 51). Here it is a list in
    reverse order, so that removing the first request from the end is cheap.
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self.num_tokens = 0  # prompt tokens of all waiting requests

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """Requests in queue order. The current request may be removed during the iteration."""
        return reversed(self._requests)

    def on_scheduled(self, request: Request, num_tokens: int) -> None:
        """A step computes num_tokens of this request. An iteration over the queue may be under way."""

    def on_finished(self, request: Request) -> None:
        """The request has ended, running or waiting; `add` will not get it again."""

    def victim_for_blocks(self, running: Sequence[Request]) -> Request:
        """Which of `running` the scheduler must preempt when blocks are lacking.

        Not always the same requests, or they never end: here the last in the order, so the first always goes on.
        """
        return max(running, key=lambda request: request.order)

    def victim_for_row(self, first: Request, running: Sequence[Request]) -> Request | None:
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
