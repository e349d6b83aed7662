"""The log line of speculative decoding, in the form of vLLM's.

Knows counters of the engine. Does not know drafters.
"""

from __future__ import annotations

from quire.observe.metric_table import PER_POSITION
from quire.protocol.output import EngineStats

PREFIX = "spec_decode_num_"


def speculation_line(now: EngineStats, before: EngineStats, seconds: float) -> str:
    """Empty if nothing was verified since `before`, which is `seconds` old."""

    def growth(name: str) -> float:
        return now.counts.get(name, 0.0) - before.counts.get(name, 0.0)

    verified, drafted = growth(PREFIX + "drafts"), growth(PREFIX + "draft_tokens")
    accepted = growth(PREFIX + "accepted_tokens")
    if not (verified and drafted and seconds > 0):
        return ""
    positions = [name for name in now.counts if name.startswith(PER_POSITION + ":")]
    rates = ", ".join(f"{growth(name) / verified:.3f}" for name in positions)
    return (
        f"SpecDecoding metrics: Mean acceptance length: {1 + accepted / verified:.2f},"
        f" Accepted throughput: {accepted / seconds:.2f} tokens/s,"
        f" Drafted throughput: {drafted / seconds:.2f} tokens/s,"
        f" Accepted: {accepted:.0f} tokens, Drafted: {drafted:.0f} tokens,"
        f" Per-position acceptance rate: {rates},"
        f" Avg Draft acceptance rate: {100 * accepted / drafted:.1f}%"
    )
