"""What an answer says of its draft tokens, with per_request_spec_decode_metrics.

Knows counts by step. Does not know which field of an answer has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def spec_decode_metrics(verified: Sequence[tuple[int, int, int]]) -> dict[str, Any]:
    """The draft tokens of an output. `verified`: by step: draft tokens, accepted ones, num_speculative_tokens."""
    drafted = [step[0] for step in verified]
    accepted = [step[1] for step in verified]
    most = verified[-1][2] if verified else 0
    return {
        "mean_acceptance_length": 1 + sum(accepted) / len(accepted) if accepted else 1.0,
        "draft_acceptance_rate": sum(accepted) / sum(drafted) if drafted else 0.0,
        "acceptance_histogram": [accepted.count(count) for count in range(most + 1)],
        "num_spec_steps": len(accepted),
        "num_accepted_draft_tokens": sum(accepted),
        "num_draft_tokens": sum(drafted),
        "num_spec_tokens": most,
        "per_step_num_draft_tokens": drafted,
        "per_step_num_accepted_tokens": accepted,
    }
