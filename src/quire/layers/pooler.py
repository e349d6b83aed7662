"""Pooler: from the pooled hidden states of one request to its vector or its scores.

Knows stages (dense layers, norms, activations), heads and their order. Does not know rows, chunks or checkpoints. Every
function takes one request, in float32, so that no result depends on other requests.

Shape suffixes: D features, V features of a vector or tokens of the vocabulary, L labels, N tokens of the request (or 1).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire.config.pooling import PoolingModel, Splade, Stage
from quire.errors import ConfigError
from quire.layers.linear import Linear
from quire.ops.reference import linear

PLAIN = {"identity": nn.Identity, "softmax": nn.Softmax, "sigmoid": nn.Sigmoid}
"""Names of config.json -> classes."""
FROM = ("torch.nn.modules.activation", "torch.nn.modules.linear")
TOKENS_AT_ONCE = 64
"""Tokens whose logits are in memory together."""


def activation(name: str) -> nn.Module:
    """The activation of this name: a class of torch.nn, made without arguments; over the last dimension.

    Raises:
        ConfigError: there is no such activation.
    """
    found = PLAIN.get(name) or getattr(nn, name, None)
    if isinstance(found, type) and issubclass(found, nn.Module) and found.__module__ in FROM:
        try:
            dims = {"dim": -1} if found in (nn.Softmax, nn.LogSoftmax, nn.Softmin) else {}
            module = found(**dims)
        except TypeError:
            module = None
        if module is not None and not list(module.parameters()):
            return module
    raise ConfigError(
        f"activation {name!r}: must be an activation of torch.nn that needs no arguments"
    )


class PoolerStage(nn.Module):
    """One stage; see `config.pooling.Stage`. `models/pooling/head.py` sets its weights."""

    def __init__(self, stage: Stage):
        super().__init__()
        self.stage = stage
        self.linear: Linear | None = None
        self.residual: Linear | None = None
        self.scale_D: Tensor | None = None
        self.shift_D: Tensor | None = None
        self.activation = activation(stage.activation) if stage.activation else None

    def forward(self, x_ND: Tensor) -> Tensor:
        stage, y = self.stage, x_ND
        if stage.kind == "normalize":
            y = F.normalize(x_ND, dim=-1)
        elif stage.kind == "layer_norm":
            y = F.layer_norm(x_ND, x_ND.shape[-1:], self.scale_D, self.shift_D, stage.eps)
        elif self.linear is not None:
            y = self.linear(x_ND)
        if self.activation is not None:
            y = self.activation(y)
        if stage.residual:
            y = y + (x_ND if self.residual is None else self.residual(x_ND))
        return y


class Pooler(nn.Module):
    """The stages and heads of a pooling model. `rows_LD`: a head that is made from rows of the LM head."""

    def __init__(self, model: PoolingModel):
        super().__init__()
        self.model = model
        self.stages = _stages(model.stages)
        self.token_stages = _stages(model.token_stages)
        self.head = _stages(model.head)
        self.token_head = self.head if model.token_head == model.head else _stages(model.token_head)
        self.to_logits = _stages([] if model.splade is None else model.splade.stages)
        self.rows_LD: Tensor | None = None
        self.class_activation = activation(model.activation or "identity")

    def embed(self, parts: Sequence[Tensor], dimensions: int, activate: bool) -> Tensor:
        """x_V from the pooled states of each pooler [D]; `dimensions`: cut, before it is normalized; 0: not cut."""
        x_1V = self.stages(torch.cat(list(parts))[None])
        return _vector(x_1V, dimensions, activate)[0]

    def splade(self, hidden_ND: Tensor) -> Tensor:
        """weights_V of the tokens of the vocabulary; see `config.pooling.Splade`."""
        how = self.model.splade or Splade()
        found_V = hidden_ND.new_zeros(how.stages[-1].num_out)
        for some_ND in hidden_ND.split(TOKENS_AT_ONCE):
            weights_NV = torch.log1p(torch.relu(self.to_logits(some_ND)))
            if how.twice:
                weights_NV = torch.log1p(weights_NV)
            rows_NV = torch.cat((found_V[None], weights_NV))
            found_V = rows_NV.amax(0) if how.pooling == "max" else rows_NV.sum(0)
        return found_V

    def token_embed(self, hidden_ND: Tensor, dimensions: int, activate: bool) -> Tensor:
        """x_NV, a vector of each token."""
        return _vector(self.token_stages(hidden_ND), dimensions, activate)

    def classify(self, parts: Sequence[Tensor], activate: bool) -> Tensor:
        """scores_L from the pooled states of each pooler [D]."""
        return self._scores(self._labels(self.head, torch.cat(list(parts))[None]), activate)[0]

    def token_classify(
        self, hidden_ND: Tensor, activate: bool, labels: Sequence[int] | None = None
    ) -> Tensor:
        """scores_NL, of these labels only, if given."""
        scores_NL = self._labels(self.token_head, hidden_ND)
        if labels is not None:
            scores_NL = scores_NL[:, list(labels)]
        return self._scores(scores_NL, activate)

    def _labels(self, head: nn.Module, x_ND: Tensor) -> Tensor:
        if self.rows_LD is None:
            scores_NL: Tensor = head(x_ND)
            return scores_NL
        return linear(x_ND.to(self.rows_LD.dtype), self.rows_LD).float()

    def _scores(self, scores_NL: Tensor, activate: bool) -> Tensor:
        model = self.model
        if model.logit_mean is not None:
            scores_NL = scores_NL - model.logit_mean
        if model.logit_sigma is not None:
            scores_NL = scores_NL / model.logit_sigma
        return self.class_activation(scores_NL) if activate else scores_NL


def _stages(stages: Sequence[Stage]) -> nn.Sequential:
    return nn.Sequential(*(PoolerStage(stage) for stage in stages))


def _vector(x_NV: Tensor, dimensions: int, activate: bool) -> Tensor:
    """Cut, then normalized by the norm of the cut vector."""
    if dimensions:
        x_NV = x_NV[:, :dimensions]
    return F.normalize(x_NV, dim=-1) if activate else x_NV
