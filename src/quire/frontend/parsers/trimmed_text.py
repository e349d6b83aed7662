"""Trims white space around markers from the emitted text, as text arrives.

Knows text and borders. Does not know markers.
"""

from __future__ import annotations


class TrimmedText:
    """Emitted text; withholds trailing white space until more text follows."""

    def __init__(self, border: bool = False) -> None:
        self.out: list[str] = []
        self.held: list[str] = []
        self.lead: list[str] = []
        """White space since the border."""
        self.begun = False
        self.border = border
        """No text since a marker."""
        self.left = False
        """The parser left this text for another state."""

    def add(self, text: str) -> None:
        body = text.rstrip()
        if not body:
            (self.lead if self.border else self.held).append(text)
            return
        if self.border:
            # Between two pieces of text, keep the white space of only one side of the border.
            rest = body.lstrip()
            if self.begun:
                space = "".join(self.held) or "".join(self.lead) + body[: len(body) - len(rest)]
                self.out.append(space)
            self.out.append(rest)
        else:
            self.out += [*self.held, body]
        self.held = [text[len(body) :]] if len(body) < len(text) else []
        self.lead = []
        self.begun, self.border, self.left = True, False, False

    def end(self) -> None:
        if not self.left:
            self.out += self.held
        self.held, self.lead = [], []

    def take(self) -> str:
        new = "".join(self.out)
        self.out.clear()
        return new
