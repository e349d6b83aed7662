"""Text that is shown, less the white space that is only layout around marks.

Knows text and borders. Does not know why there is a border.
"""

from __future__ import annotations


class TrimmedText:
    """Shown text, of which white space at the end waits until more comes."""

    def __init__(self, border: bool = False) -> None:
        self.out: list[str] = []
        self.held: list[str] = []
        self.lead: list[str] = []
        """White space since the border."""
        self.begun = False
        self.border = border
        """Nothing came since a mark."""
        self.left = False
        """A mark led away."""

    def add(self, text: str) -> None:
        body = text.rstrip()
        if not body:
            (self.lead if self.border else self.held).append(text)
            return
        if self.border:
            # Where text follows text, the white space of one side of what was between them is kept.
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
