"""Printing of an answer as it arrives: its text on stdout, notices about it on stderr.

Knows the terminal and pieces of answers. Does not know where they come from.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

from quire import env
from quire.cli.completion_client import AnswerDelta, TimingLine
from quire.logging import printable

DIM, NOT_DIM = "\x1b[2m", "\x1b[22m"


def print_answer(pieces: Iterator[AnswerDelta], stats: bool) -> str:
    """Write an answer as it arrives; returns all of it, without reasoning. Ctrl-C stops it.

    A terminal shows reasoning too, dimmed. Other outputs get the answer only.
    """
    clock, parts, writer = TimingLine(pieces), [], AnswerWriter()
    cut = ""
    try:
        for piece in clock:
            parts.append(piece.text)
            writer.write(piece)
            if piece.finish_reason == "length":
                count = piece.num_tokens
                cut = f"(cut at {'the maximum number of' if count is None else count} tokens)"
    except KeyboardInterrupt:
        writer.write(AnswerDelta(" ..."))
    finally:
        close = getattr(pieces, "close", None)
        if close is not None:
            close()
        writer.end()
    if cut:
        print_notice(cut)
    if stats:
        print_notice(str(clock))
    return "".join(parts)


class AnswerWriter:
    """Writes the pieces of one answer on stdout."""

    def __init__(self) -> None:
        self.shows_reasoning = sys.stdout.isatty()
        plain = env.outer("TERM") in (None, "dumb") or bool(env.outer("NO_COLOR"))
        self.dim, self.not_dim = ("", "") if plain else (DIM, NOT_DIM)
        self.reasoning = False
        """Reasoning was written last."""

    def write(self, piece: AnswerDelta) -> None:
        if self.shows_reasoning:  # a terminal, which the text of a model must not control
            piece = replace(piece, text=printable(piece.text), reasoning=printable(piece.reasoning))
        if piece.reasoning and self.shows_reasoning:
            sys.stdout.write(piece.reasoning if self.reasoning else self.dim + piece.reasoning)
            self.reasoning = True
        if piece.text:
            if self.reasoning:
                sys.stdout.write(f"{self.not_dim}\n\n")
            self.reasoning = False
            sys.stdout.write(piece.text)
        sys.stdout.flush()

    def end(self) -> None:
        sys.stdout.write(f"{self.not_dim if self.reasoning else ''}\n")
        sys.stdout.flush()


def print_notice(words: str) -> None:
    """Print to the user, on stderr, so that stdout has only answers."""
    print(words, file=sys.stderr, flush=True)
