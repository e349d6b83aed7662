"""The page of `--plot-timeline`: a bar for each request, from sending to its last token.

Knows the results of requests. Draws SVG in a self-contained HTML page.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

from quire.bench.serve.endpoints import RequestRecord

WIDTH, ROW, LEFT, TOP = 1000, 8, 60, 24  # pixels
GAPS_MS = (25.0, 50.0)
"""Thresholds for gaps between tokens: up to the first they are fine, above the second users notice them."""
COLOURS = {"first": "#9ab", "fine": "#4a8", "slow": "#eb3", "late": "#c44", "failed": "#000"}
STYLE = "body{font:14px/1.5 sans-serif;margin:2em}b{padding:0 .6em;margin-right:.3em}"


def page(done: Sequence[RequestRecord], title: str, gaps_ms: tuple[float, float] = GAPS_MS) -> str:
    """The page; requests from top to bottom in the order of sending."""
    rows = sorted(done, key=lambda one: one.start)
    begin = rows[0].start if rows else 0.0
    whole = max((one.start + one.latency for one in rows), default=0.0) - begin or 1.0
    parts = [ticks(whole, len(rows))]
    for index, one in enumerate(rows):
        parts += bars(one, TOP + index * ROW, begin, WIDTH / whole, gaps_ms)
    fine, slow = gaps_ms
    words = {
        "first": "to the first token", "fine": f"gaps up to {fine:g} ms", "slow": f"up to {slow:g} ms",
        "late": "longer", "failed": "failed",
    }  # fmt: skip
    legend = "".join(
        f'<b style="background:{COLOURS[name]}"></b>{text}&emsp;' for name, text in words.items()
    )
    height = TOP + len(rows) * ROW + 4
    return (
        f"<!doctype html><meta charset=utf-8><title>{html.escape(title)}</title><style>{STYLE}</style>"
        f"<h1>{html.escape(title)}</h1><p>{legend}</p>"
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 20}" height="{height}" font-size="11">'
        f"{''.join(parts)}</svg>\n"
    )


def ticks(whole: float, count: int) -> str:
    """The time axis, with ten divisions."""
    found = []
    for tenth in range(11):
        x = LEFT + WIDTH * tenth / 10
        found.append(
            f'<path d="M{x:.1f} {TOP - 4}V{TOP + count * ROW}" stroke="#ddd"/>'
            f'<text x="{x:.1f}" y="{TOP - 8}" text-anchor="middle">{whole * tenth / 10:.3g} s</text>'
        )
    return "".join(found)


def bars(
    one: RequestRecord, y: int, begin: float, scale: float, gaps_ms: tuple[float, float]
) -> list[str]:
    """The bars of one request; adjacent gaps of one colour become one bar."""
    pieces = [("failed", max(one.latency, 2 / scale))] if not one.ok else [("first", one.ttft)]
    for gap in one.itls if one.ok else ():
        kind = (
            "fine" if gap * 1000 <= gaps_ms[0] else "slow" if gap * 1000 <= gaps_ms[1] else "late"
        )
        if pieces[-1][0] == kind:
            pieces[-1] = kind, pieces[-1][1] + gap
        else:
            pieces.append((kind, gap))
    x, found = LEFT + (one.start - begin) * scale, []
    for kind, seconds in pieces:
        wide = seconds * scale
        found.append(
            f'<rect x="{x:.2f}" y="{y}" width="{wide:.2f}" height="{ROW - 2}" fill="{COLOURS[kind]}">'
            f"<title>{kind}: {seconds * 1000:.1f} ms</title></rect>"
        )
        x += wide
    return found
