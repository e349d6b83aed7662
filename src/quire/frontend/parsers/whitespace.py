"""Trims white space around markers from the emitted text, as text arrives.

Knows text and borders. Does not know markers.
"""

from __future__ import annotations


class TrimmedText:
    """Emitted text; withholds trailing white space until more text follows."""

    def __init__(self, at_border: bool = False) -> None:
        self.out: list[str] = []
        self.trailing_space: list[str] = []
        self.leading_space: list[str] = []
        """White space since the border."""
        self.has_text = False
        self.at_border = at_border
        """No text since a marker."""
        self.is_left = False
        """The parser left this text for another state."""

    def add(self, text: str) -> None:
        body = text.rstrip()
        if not body:
            (self.leading_space if self.at_border else self.trailing_space).append(text)
            return
        if self.at_border:
            # Between two pieces of text, keep the white space of only one side of the border.
            rest = body.lstrip()
            if self.has_text:
                space = (
                    "".join(self.trailing_space)
                    or "".join(self.leading_space) + body[: len(body) - len(rest)]
                )
                self.out.append(space)
            self.out.append(rest)
        else:
            self.out += [*self.trailing_space, body]
        self.trailing_space = [text[len(body) :]] if len(body) < len(text) else []
        self.leading_space = []
        self.has_text, self.at_border, self.is_left = True, False, False

    def end(self) -> None:
        if not self.is_left:
            self.out += self.trailing_space
        self.trailing_space, self.leading_space = [], []

    def take(self) -> str:
        new = "".join(self.out)
        self.out.clear()
        return new


def strip_newlines(text: str) -> str:
    """The text without its first character and without its last, where that character is a line break."""
    return text.removeprefix("\n").removesuffix("\n")


def unquoted(text: str) -> str:
    """The text without the quotes around it."""
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text
