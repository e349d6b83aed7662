"""StateLayer: a layer with a recurrent state of fixed size for each request (Mamba, delta nets, short convolutions).

Knows the shapes of its state. The worker allocates, clears and copies states
(`worker/row_states.py`). A layer finds the state of a row at the row's index, and always continues from it: a request
that starts, or starts again, finds zeros there.

In a forward pass the layer reads `rows_B` and `query_start_B1` of `current_batch()`: the tokens
query_start_B1[b] : query_start_B1[b + 1] belong to row rows_B[b], and continue from `state[i][rows_B[b]]`. The layer
leaves the state after the last of these tokens there. Padding has the row after the last one.

The recurrence is computed token by token in every step, so that its bits do not depend on how a prompt is divided into
steps (docs/design/recurrent-state.md).

Shape suffixes: R rows, the padding's included.
"""

from __future__ import annotations

from torch import Tensor

from quire.kvcache.specs import StateSpec
from quire.layers.weight_slots import Layer


class StateLayer(Layer):
    """A subclass gives the shapes of its state, and reads and writes `state` in `forward`.

    Attributes:
        state: for each shape of `state_spec()` a tensor [R, *shape], contiguous within a row; rows are stride(0) apart.
            Empty until the worker has allocated it.
    """

    state: tuple[Tensor, ...] = ()

    def state_spec(self) -> StateSpec:
        """What one request needs in this layer."""
        raise NotImplementedError

    def bind_state(self, state: tuple[Tensor, ...]) -> None:
        """Use these tensors from now on."""
        self.state = state

    def drop_state(self) -> None:
        """Forget the tensors, so that their memory can be freed; `bind_state` gives the layer others."""
        self.state = ()
