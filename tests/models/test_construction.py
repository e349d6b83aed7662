"""Models that threads construct at once leave torch's default dtype as it was."""

from __future__ import annotations

import threading
import time

import torch

from quire.models.construction import construction


def test_threads_that_construct_at_once_restore_the_default_dtype() -> None:
    """Regression: two ranks in threads left bfloat16 as the default, and kernels read float32 from half the memory."""
    before = torch.get_default_dtype()

    def construct(wait_s: float) -> None:
        with construction(torch.bfloat16):
            time.sleep(wait_s)

    first, second = (threading.Thread(target=construct, args=(wait_s,)) for wait_s in (0.05, 0.15))
    first.start()
    time.sleep(0.02)  # the second begins while the first is inside
    second.start()
    first.join()
    second.join()
    assert torch.get_default_dtype() == before
