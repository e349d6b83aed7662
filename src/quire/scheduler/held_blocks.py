"""HeldBlocks: the blocks of requests that have lost their row, while a gate still needs them.

Knows which gate holds the blocks of which request. Does not know why. The blocks stay in the request and in use; a
preempted request whose blocks are held back is not admitted again.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.kvcache.block_pool import NULL_BLOCK
from quire.kvcache.manager import KVManager
from quire.scheduler.gate import Gate
from quire.scheduler.request import Request


class HeldBlocks:
    """Frees the blocks of a request when no gate holds them back any more."""

    def __init__(self, kv: KVManager):
        self.kv = kv
        self._gates: dict[Request, list[Gate]] = {}

    def __len__(self) -> int:
        return len(self._gates)

    def __contains__(self, request: Request) -> bool:
        return request in self._gates

    def release(self, request: Request, gates: Sequence[Gate]) -> None:
        """Free the blocks of a request, unless some of these gates hold them back."""
        if holding_gates := [gate for gate in gates if not gate.release(request)]:
            self._gates[request] = holding_gates
        else:
            self._gates.pop(request, None)
            self.kv.release(request)

    def retry(self) -> None:
        """Ask the gates that hold blocks back again."""
        for request, gates in list(self._gates.items()):
            self.release(request, gates)

    def revoke(self) -> None:
        """Free all blocks now. Their gates must not use them any more."""
        for request, gates in self._gates.items():
            for gate in gates:
                gate.revoke(request)
            self.kv.release(request)
        self._gates.clear()

    def of_preempted(self) -> bool:
        """Whether some of these requests are to be admitted again."""
        return any(request.finish is None for request in self._gates)

    @property
    def num_blocks(self) -> int:
        """How many different blocks are held back."""
        blocks = {b for request in self._gates for column in request.blocks for b in column}
        return len(blocks - {NULL_BLOCK})
