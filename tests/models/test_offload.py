"""Weights that travel: whatever a device does first, a layer computes with its own weights; and the copies are ahead.

The device here is two queues of work, one of computing and one of copies, that are worked off in any order that their
marks allow while the host queues more. A layer looks at all of its weights when it begins and when it ends. Each
mutation of the order must be found out by the same runs.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quire.layers.linear import Linear
from quire.layers.weight_slots import set_parameter
from quire.layers.weights import weight_tensors
from quire.models import offload
from quire.models.offload import Offload, Pair, Ring
from quire.quantization.fp8 import Float8Weight

SEEDS = range(24)


class Mark:
    reached = False


class Device:
    """Copies in two pieces each; what is queued runs when its turn comes, not before."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.queues: tuple[deque, deque] = deque(), deque()
        self.wrong: list[str] = []
        self.ahead = 0  # copies that were done before anybody waited for them

    def host(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.uint8)

    def device(self, size: int) -> Tensor:
        return torch.full((size,), 255, dtype=torch.uint8)

    def compute(self, work: Callable[[], None]) -> None:
        self.queues[0].append(work)

    def mark(self) -> Mark:
        mark = Mark()
        self.queues[0].append(lambda: setattr(mark, "reached", True))
        return mark

    def copy(self, pairs: Sequence[Pair], after: Mark) -> Mark:
        done, queue = Mark(), self.queues[1]
        queue.append(after)
        for into, source in pairs:
            half = len(into) // 2
            for part in (slice(0, half), slice(half, None)):
                queue.append(lambda a=into[part], b=source[part]: a.copy_(b))
        queue.append(lambda: setattr(done, "reached", True))
        return done

    def wait(self, mark: Mark) -> None:
        self.ahead += mark.reached
        self.queues[0].append(mark)

    def run(self, most: int) -> None:
        """Some of what may run; a queue that waits for a mark lets the other go on."""
        for _ in range(most):
            able = [q for q in self.queues if q and (not isinstance(q[0], Mark) or q[0].reached)]
            if not able:
                return
            head = self.rng.choice(able).popleft()
            if not isinstance(head, Mark):
                head()

    def finish(self) -> None:
        self.run(10**6)
        assert not any(self.queues), "the queues wait for each other"


class Looks(nn.Module):
    """A layer that looks at its weights on the device, in time."""

    def __init__(self, device: Device, rng: random.Random, index: int):
        super().__init__()
        self.device, self.index, self.fails = device, index, False
        wide = 8 * rng.randint(1, 6)
        self.both = Linear(wide, {"a": 8, "b": 24}, bias=rng.random() < 0.5)
        self.down = Linear(24, wide)
        for module in (self.both, self.down):
            for name, weight in list(module.named_parameters()):
                set_parameter(module, name, torch.randn(weight.shape))
        if rng.random() < 0.5:
            self.down.ref.install(Float8Weight.of(self.down.weight, False))
        self.want = [part.tensor.clone() for part in weight_tensors(self)]

    def forward(self) -> None:
        self.device.compute(self.look)
        if self.fails:
            raise RuntimeError("out of luck")
        self.device.compute(self.look)

    def look(self) -> None:
        for part, want in zip(weight_tensors(self), self.want, strict=True):
            here = part.tensor.view(torch.uint8).flatten()
            if not torch.equal(here, want.view(torch.uint8).flatten()):
                self.device.wrong.append(f"{part.name} of layer {self.index}")


def played(seed: int) -> Device:
    """Some passes over a model, some of which fail; the device many passes late or few."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    device = Device(rng)
    layers = [Looks(device, rng, i) for i in range(rng.randint(1, 7))]
    largest = max(sum(p.tensor.nbytes for p in weight_tensors(layer)) for layer in layers)
    taken = Offload(device, rng.randint(1, 5) * largest)
    taken.choose(layers)
    taken.install()
    for _ in range(rng.randint(2, 6)):
        failing = rng.choice([None, None, rng.choice(layers)])
        for layer in layers:
            layer.fails = layer is failing
            try:
                layer()
            except RuntimeError:
                break
            device.run(rng.choice([0, 0, 3, 40]))
    device.finish()
    return device


def test_every_layer_computes_with_its_own_weights() -> None:
    ahead = 0
    for seed in SEEDS:
        device = played(seed)
        assert device.wrong == []
        ahead += device.ahead
    assert ahead > 10, "no copy was ever ahead of its use"


def no_wait(ring: Ring, layer: int) -> None:
    if ring.resident[layer % 2] != layer:
        ring._copy_in(layer)


def trusting(ring: Ring, layer: int) -> None:
    """As if every pass ran to its end."""
    if ring.resident[layer % 2] is None:
        ring._copy_in(layer)
    ring.copier.wait(ring.copied[layer % 2])


def early(ring: Ring, layer: int) -> None:
    """The next layer is sent for when this one begins."""
    Ring.before(ring, layer)
    Ring.after(ring, layer)


def at_once(ring: Ring, layer: int) -> None:
    if ring.resident[layer % 2] != layer:
        ring.resident[layer % 2], now = layer, Mark()
        now.reached = True
        ring.copied[layer % 2] = ring.copier.copy(ring.copies[layer], after=now)


def no_turn(ring: Ring, layer: int) -> None:
    """The last layers fetch no other layer, and the first layers count as resident."""
    if layer + 2 < len(ring.copies):
        ring._copy_in(layer + 2)
    else:
        ring.resident[layer % 2] = layer % 2


MUTATIONS: dict[str, dict[str, Any]] = {
    "does not wait for the copy": {"before": no_wait},
    "does not check which layer has the slot": {"before": trusting},
    "sends for the next too early": {"before": early, "after": lambda ring, layer: None},
    "copies without waiting": {"_copy_in": at_once},
    "forgets the next pass": {"after": no_turn},
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_order_is_detected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "Ring", type("Mutant", (Ring,), MUTATIONS[name]))
    assert any(played(seed).wrong for seed in SEEDS)


def test_the_number_and_choice_of_offloaded_layers() -> None:
    def chosen(wanted: int, shrink: float = 1.0) -> list[int]:
        layers = [nn.ModuleList([Linear(8, 8)]) for _ in range(8)]  # 256 bytes each
        taken = Offload(Device(random.Random(0)), wanted)
        at_home = taken.choose(layers, shrink)
        assert at_home == {layer[0] for layer in taken.chosen}
        return [layers.index(layer) for layer in taken.chosen]

    assert chosen(1) == [0, 2, 5]  # two places stay on the device
    assert chosen(512) == [0, 2, 4, 6]
    assert chosen(512, shrink=0.5) == [0, 1, 2, 4, 5, 6]
    assert chosen(1 << 20) == list(range(8))


def test_layers_larger_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "CHUNK", 1 << 10)
    assert all(played(seed).wrong == [] for seed in range(4))
