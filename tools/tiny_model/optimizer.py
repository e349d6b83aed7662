"""One optimizer for the whole network: Muon for the matrices of the blocks, Adam for embedding and norms.

Master weights are float32 and live here; the network computes in its own type and gets a copy after each step.
Muon: Jordan et al. 2024 (the update is the momentum, made orthogonal by a Newton-Schulz iteration of odd quintics).
"""

from typing import Any

import torch
from torch import Tensor, nn

MOMENTUM = 0.95
BETAS = (0.9, 0.98)
QUINTIC = (3.4445, -4.7750, 2.0315)


def orthogonalize(matrices_LRC: Tensor, rounds: int = 5) -> Tensor:
    """Return matrices of the same singular vectors whose singular values are near 1; a stack at a time."""
    a, b, c = QUINTIC
    x = matrices_LRC.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(rounds):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).float()


class Optimizer:
    """Steps a network; `state()` and `restore()` carry everything a run needs to go on."""

    def __init__(self, network: nn.Module, matrix_rate: float, other_rate: float) -> None:
        self.parameters = dict(network.named_parameters())
        self.master = {name: p.detach().float().clone() for name, p in self.parameters.items()}
        self.average = {name: p.clone() for name, p in self.master.items()}
        self.first = {name: torch.zeros_like(p) for name, p in self.master.items()}
        self.second = {
            name: torch.zeros_like(p) for name, p in self.master.items() if not _by_muon(name, p)
        }
        self.matrix_rate, self.other_rate = matrix_rate, other_rate
        self.steps = 0
        self.stacks: dict[tuple[int, ...], list[str]] = {}
        for name, p in self.master.items():
            if _by_muon(name, p):
                self.stacks.setdefault(tuple(p.shape), []).append(name)

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """Take one step at `factor` times the full rates, and forget the gradients."""
        self.steps += 1
        for shape, names in self.stacks.items():
            self._muon(shape, names, factor * self.matrix_rate)
        for name in self.second.keys() & self.parameters.keys():
            self._adam(name, factor * self.other_rate)
        keep = min(0.998, self.steps / (self.steps + 10))
        for name, p in self.parameters.items():
            p.copy_(self.master[name])
            p.grad = None
            self.average[name].lerp_(self.master[name], 1 - keep)

    def _muon(self, shape: tuple[int, ...], names: list[str], rate: float) -> None:
        looks = []
        for name in names:
            grad = self.parameters[name].grad.float()
            self.first[name].lerp_(grad, 1 - MOMENTUM)
            looks.append(grad.lerp(self.first[name], MOMENTUM))
        scale = max(1.0, shape[0] / shape[1]) ** 0.5
        for name, update in zip(names, orthogonalize(torch.stack(looks)), strict=True):
            self.master[name].mul_(1 - 0.02 * rate).add_(update, alpha=-rate * scale)

    def _adam(self, name: str, rate: float) -> None:
        grad = self.parameters[name].grad.float()
        self.first[name].lerp_(grad, 1 - BETAS[0])
        self.second[name].lerp_(grad * grad, 1 - BETAS[1])
        first = self.first[name] / (1 - BETAS[0] ** self.steps)
        second = self.second[name] / (1 - BETAS[1] ** self.steps)
        self.master[name].sub_(rate * first / (second.sqrt() + 1e-8))

    def state(self) -> dict[str, Any]:
        """Return what `restore` takes."""
        names = ("master", "average", "first", "second", "steps")
        return {name: getattr(self, name) for name in names}

    @torch.no_grad()
    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a saved state. The state may have parameters that this run does not train; `state` returns them unchanged."""
        for name, value in state.items():
            setattr(self, name, value)
        for name, p in self.parameters.items():
            p.copy_(self.master[name])


def _by_muon(name: str, parameter: Tensor) -> bool:
    return parameter.ndim == 2 and "embed" not in name
