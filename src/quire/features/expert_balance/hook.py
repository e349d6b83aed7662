"""ExpertBalanceHook: moves experts between ranks, between two steps, by the tokens that they had.

Knows steps and the mixture layers of a model. Does not know how a placement is chosen (`parallel/expert_placement.py`) or how
weights move (`layers/expert_parallel.py`). All ranks run the same steps and choose the same experts, so each decides alone and all
decide the same. A token's result does not depend on the rank that computes it.

Shape suffixes: L layers, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from quire.config.parallel.experts import EplbOptions
from quire.layers.expert_parallel import PlacedExperts
from quire.layers.moe import Experts
from quire.logging import get_logger
from quire.models.base import LanguageModel
from quire.parallel.expert_placement import balanced, balancedness, load_of_ranks
from quire.protocol.plan import StepPlan
from quire.worker.hooks import Hook

log = get_logger(__name__)


class ExpertBalanceHook(Hook):
    """Every `step_interval` steps, each layer gets the placement that suits the last `window_size` steps.

    Args:
        nodes: machines of the ranks. groups: of experts that a router chooses together.
    """

    name = "expert_balance"
    order = 50

    def __init__(self, options: EplbOptions, *, nodes: int = 1, groups: int = 1):
        self.options, self.nodes, self.groups = options, nodes, groups
        self.layers: list[tuple[Experts, PlacedExperts]] = []
        self.steps = 0
        self.window: list[Tensor] = []
        self.logged: list[Tensor] = []

    def use_models(self, models: Sequence[LanguageModel]) -> None:
        """The main model's layers, if their experts may change seats."""
        modules = models[0].modules() if isinstance(models[0], nn.Module) else ()
        placed = [layer for layer in modules if isinstance(layer, Experts) and layer.is_placed]
        self.steps = 0
        self.layers = [
            (layer, layer.split)
            for layer in placed
            if isinstance(layer.split, PlacedExperts) and layer.can_move()
        ]
        if len(self.layers) < len(placed):
            log.warning(
                "enable_eplb: the experts of %d of %d layers stay on their ranks, since their weights differ in form",
                *(len(placed) - len(self.layers), len(placed)),
            )
        self.window = self.logged = self._loads()

    def accepts_fast_step(self, plan: StepPlan) -> bool:
        """The kernels count loads, too."""
        return True

    def after(self, plan: StepPlan) -> None:
        """Count the step; move experts if it is time."""
        if not plan.work or not self.layers:
            return
        self.steps += 1
        options = self.options
        if options.log_balancedness and self.steps % options.log_balancedness_interval == 0:
            before, self.logged = self.logged, self._loads()
            self._log("balancedness of the experts' ranks", self.logged, before)
        since = self.steps % options.step_interval
        if since == 0:
            self._move()
        if since == max(options.step_interval - options.window_size, 0):
            self.window = self._loads()

    def _loads(self) -> list[Tensor]:
        """loads_E of each layer up to now."""
        return [split.loads_E.clone() for _, split in self.layers]

    def _move(self) -> None:
        now, seats = self._loads(), 0
        for (layer, split), load_E, before_E in zip(self.layers, now, self.window, strict=True):
            loads = (load_E - before_E).tolist()
            if any(loads):
                where = balanced(loads, split.where, nodes=self.nodes, groups=self.groups)
                seats += layer.move(where)
        self._log(
            f"{seats} seats of this rank have another expert; balancedness now", now, self.window
        )

    def _log(self, what: str, now: list[Tensor], before: list[Tensor]) -> None:
        if any(split.ranks.rank for _, split in self.layers):
            return
        by_layer = [
            load_of_ranks((load_E - before_E).tolist(), split.where)
            for (_, split), load_E, before_E in zip(self.layers, now, before, strict=True)
        ]
        log.info("%s: %.3f", what, balancedness(by_layer))
