"""Random workloads equal to a step-by-step reference. More by hand: `python tests/engine/workload.py 20000`."""

from __future__ import annotations

import logging

import pytest
import workload


@pytest.mark.sampled(2)
@pytest.mark.parametrize("first", range(0, 600, 100))
def test_outputs_equal_the_reference_and_no_block_leaks(first: int) -> None:
    logging.disable(logging.CRITICAL)
    try:
        for seed in range(first, first + 100):
            workload.trial(seed)
    finally:
        logging.disable(logging.NOTSET)


def test_some_workloads_mix_drafts_and_added_tokens() -> None:
    logging.disable(logging.CRITICAL)
    try:
        devices = [workload.trial_of(seed)[0].device for seed in range(60)]
    finally:
        logging.disable(logging.NOTSET)
    assert sum(device.num_added for device in devices if device.drafts) > 20
