"""faster-whisper's feature extractor and CTranslate2, samples in and tokens out: see speech_lines.py. Batches of 8 windows, its default.

Its environment's Python runs it.
"""

from __future__ import annotations

from typing import Any

import lines
import speech_lines

BATCH = 8


def main() -> None:
    asked = speech_lines.asked()
    answers = lines.own_output()
    import ctranslate2
    import faster_whisper
    import numpy as np
    from faster_whisper.feature_extractor import FeatureExtractor

    model = ctranslate2.models.Whisper(asked["model"], device="cpu", intra_threads=asked["threads"], **asked["options"])  # fmt: skip
    extractor = FeatureExtractor()

    def transcribe(sound: list[Any], output: int) -> list[list[int]]:
        found: list[list[int]] = []
        most = max(
            2 * output, output + len(asked["prompt"]) - 1
        )  # CTranslate2 draws half of it, at most
        for first in range(0, len(sound), BATCH):
            some = sound[first : first + BATCH]
            features = np.stack([extractor(one, padding=0)[:, :3000] for one in some])
            results = model.generate(
                ctranslate2.StorageView.from_array(np.ascontiguousarray(features, np.float32)), [asked["prompt"]] * len(some),
                beam_size=1, max_length=most, suppress_blank=False, suppress_tokens=[asked["end"]],
            )  # fmt: skip
            found += [one.sequences_ids[0] for one in results]
        return found

    about = {"version": faster_whisper.__version__, "ctranslate2": ctranslate2.__version__, "threads": asked["threads"], **asked["options"]}  # fmt: skip
    speech_lines.serve(answers, about, transcribe)


if __name__ == "__main__":
    main()
