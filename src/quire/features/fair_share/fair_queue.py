"""FairQueue: a waiting queue that shares the engine fairly between tenants, by weight.

Knows tenants, weights and tokens served. Does not know API keys (the frontend names tenants) or devices. The
rule is the virtual token counter of "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024):

    served[t] += cost / weight[t]        a prompt token costs 1, an output token OUTPUT
    next: the waiting tenant with the lowest served[t]
    a tenant that returns after a pause starts at the lowest served[t] of the tenants that have requests

The queue is work-conserving: while rows are free, every request runs. When no row is free and a waiting tenant has
less than its share of the rows, the scheduler preempts the newest request of the tenant with the most rows for its
weight. The blocks of that request stay in the prefix cache, so little is computed again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from quire.scheduler.request import Request
from quire.scheduler.waiting_queue import WaitingQueue

OUTPUT = 2.0  # an output token needs a pass over the weights of its own, prompt tokens share one
MOST_IDLE = 1024  # how many tenants without requests are remembered


class FairQueue(WaitingQueue):
    """One queue for each tenant. `weights` may be replaced at any time; the default weight is 1."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        super().__init__()
        self.weights: Mapping[str, float] = weights or {}
        self.served: dict[str, float] = {}
        self._lines: dict[str, WaitingQueue] = {}
        self.here: dict[str, int] = {}  # requests of each tenant, waiting or running
        # `served` of the tenant that left last: the first to come back starts there
        self._last = 0.0

    def weight(self, tenant: str) -> float:
        return self.weights.get(tenant, 1.0)

    def set_weights(self, weights: dict[str, float]) -> None:
        """Replace the weights of tenants."""
        self.weights = weights

    def __len__(self) -> int:
        return sum(len(line) for line in self._lines.values())

    def __iter__(self) -> Iterator[Request]:
        """Requests in queue order. Service that is charged during the iteration counts."""
        lines = {tenant: iter(line) for tenant, line in self._lines.items()}
        firsts = {tenant: next(line) for tenant, line in lines.items()}
        while firsts:
            tenant = min(firsts, key=lambda t: (self.served[t], firsts[t].order))
            yield firsts.pop(tenant)
            if (following := next(lines[tenant], None)) is not None:
                firsts[tenant] = following

    def add(self, request: Request) -> None:
        tenant = request.tenant
        if request.preemptions == 0:
            self._arrive(tenant)
        self._lines.setdefault(tenant, WaitingQueue()).add(request)
        self.num_tokens += request.num_prompt

    def remove(self, request: Request) -> None:
        line = self._lines[request.tenant]
        line.remove(request)
        if not len(line):
            del self._lines[request.tenant]
        self.num_tokens -= request.num_prompt

    def on_finished(self, request: Request) -> None:
        self.here[request.tenant] -= 1
        if not self.here[request.tenant]:
            del self.here[request.tenant]
            self._last = self.served[request.tenant]
            if len(self.served) - len(self.here) > MOST_IDLE:
                self.served = {tenant: self.served[tenant] for tenant in self.here}

    def on_scheduled(self, request: Request, num_tokens: int) -> None:
        is_output = num_tokens == 1 and request.num_computed_tokens > request.num_prompt
        cost = OUTPUT if is_output else num_tokens
        self.served[request.tenant] += cost / self.weight(request.tenant)

    def victim_for_row(self, first: Request, running: Sequence[Request]) -> Request | None:
        rows: dict[str, int] = {}
        for request in running:
            rows[request.tenant] = rows.get(request.tenant, 0) + 1

        def share(tenant: str, more: int = 0) -> float:
            return (rows.get(tenant, 0) + more) / self.weight(tenant)

        most = max(rows, key=share)
        # It must still have at least as large a share afterwards, or the two tenants would preempt each other forever.
        if share(most, -1) < share(first.tenant, 1):
            return None
        return max((r for r in running if r.tenant == most), key=lambda r: r.order)

    def _arrive(self, tenant: str) -> None:
        if tenant not in self.here:
            floor = min((self.served[other] for other in self.here), default=self._last)
            self.served[tenant] = max(self.served.get(tenant, 0.0), floor)
        self.here[tenant] = self.here.get(tenant, 0) + 1
