"""What one training document is, and to which side of the split it belongs.

Knows nothing of tokens or of the text format: `chat.py` renders, `corpus.py` tokenizes and packs.
"""

import hashlib
from dataclasses import dataclass, field
from typing import Any

HELD_OUT_IN = 16  # one key in this many is never trained on


@dataclass
class Sample:
    """One document: either raw text (`messages` empty) or a conversation with the answer to be learnt.

    `key` names what makes the task new (for a sum: the two numbers, not the wording); the split goes by it. "" says that
    the task is a fixed one that can only be learnt by heart, so it is never held out.
    `reasoning` None means the model answers without a thought; "" is never used.
    `every_turn` says that the answers of earlier turns are to be learnt as well.
    `thinking` False renders the prompt as a client that turned thinking off would.
    `pieces` are the answer in parts, each with its weight in the loss; without them all of it counts the same.
    `schema` is what a client sends beside the prompt.
    """

    family: str
    answer: str
    key: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    calls: list[dict[str, Any]] | None = None
    reasoning: str | None = None
    thinking: bool = True
    every_turn: bool = False
    expected: Any = None
    pieces: list[tuple[str, float]] | None = None
    schema: dict[str, Any] | None = None

    @property
    def held_out(self) -> bool:
        """Whether this sample is kept away from training."""
        if not self.key:
            return False
        digest = hashlib.sha1(f"{self.family}\n{self.key}".encode()).digest()
        return digest[0] % HELD_OUT_IN == 0


def ask(text: str, system: str | None = None) -> list[dict[str, Any]]:
    """Return the messages of a one-turn conversation."""
    head = [{"role": "system", "content": system}] if system else []
    return [*head, {"role": "user", "content": text}]
