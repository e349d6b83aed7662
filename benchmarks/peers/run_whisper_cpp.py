"""whisper.cpp, samples in and tokens out: see speech_lines.py. One window at a time, as it has no batches.

Its environment's Python runs it.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import lines
import speech_lines


def main() -> None:
    asked = speech_lines.asked()
    answers = lines.own_output()
    import _pywhispercpp as low
    from pywhispercpp.model import Model

    model = Model(
        asked["model"], n_threads=asked["threads"], print_progress=False, print_realtime=False, print_timestamps=False,
        single_segment=True, no_context=True, no_timestamps=True, temperature_inc=0.0, language="en",
    )  # fmt: skip

    def transcribe(sound: list[Any], output: int) -> list[list[int]]:
        found = []
        for one in sound:
            model.transcribe(one, max_tokens=max(1, output - 1))  # its last step draws one more
            context = model._ctx
            segments = range(low.whisper_full_n_segments(context))
            places = [
                (n, at) for n in segments for at in range(low.whisper_full_n_tokens(context, n))
            ]
            found.append(
                [low.whisper_full_get_token_id(context, n, at) for n, at in places][:output]
            )
        return found

    about = {"version": version("pywhispercpp"), "threads": asked["threads"]}
    speech_lines.serve(answers, about, transcribe)


if __name__ == "__main__":
    main()
