"""A progress bar over requests: tqdm's, the program's own, or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

Progress = bool | Callable[..., Any]


class ProgressBar:
    """A progress bar; does nothing without `bar`."""

    def __init__(self, bar: Any = None):
        self.bar = bar
        self.input, self.output = 0, 0

    def update(self, count: int) -> None:
        if self.bar is not None and count:
            self.bar.update(count)

    def count(self, output: Any) -> None:
        if self.bar is None:
            return
        self.input += len(output.prompt_token_ids)
        self.output += sum(len(getattr(one, "token_ids", ())) for one in output.parts)
        elapsed = getattr(self.bar, "format_dict", {}).get("elapsed") or 0
        if elapsed and hasattr(self.bar, "set_postfix_str"):
            self.bar.set_postfix_str(
                f"input: {self.input / elapsed:.1f} tokens/s, output: {self.output / elapsed:.1f} tokens/s",
                refresh=False,
            )
        self.bar.update(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *what: object) -> None:
        if self.bar is not None:
            self.bar.close()


def progress(use_tqdm: Progress, total: int, what: str = "Processed prompts") -> ProgressBar:
    """`use_tqdm` True: tqdm's bar; a callable: called with tqdm's arguments to make the bar; False: none."""
    if use_tqdm is False or not total:
        return ProgressBar()
    make: Any = use_tqdm
    if use_tqdm is True:
        from tqdm.auto import tqdm

        make = tqdm
    return ProgressBar(make(total=total, desc=what, dynamic_ncols=True))
