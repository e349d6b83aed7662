"""Whisper of Transformers, samples in and tokens out: see speech_lines.py. Batches of 16 windows."""

from __future__ import annotations

from typing import Any

import lines
import speech_lines

BATCH = 16


def main() -> None:
    asked = speech_lines.asked()
    answers = lines.own_output()
    import torch
    import transformers
    from transformers import (
        GenerationMixin,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
    )

    torch.set_num_threads(asked["threads"])
    dtype = getattr(torch, asked["options"]["dtype"])
    model = WhisperForConditionalGeneration.from_pretrained(asked["model"], dtype=dtype).eval()
    extractor = WhisperFeatureExtractor.from_pretrained(asked["model"])

    @torch.inference_mode()
    def transcribe(sound: list[Any], output: int) -> list[list[int]]:
        found: list[list[int]] = []
        for first in range(0, len(sound), BATCH):
            some = sound[first : first + BATCH]
            features = extractor(some, sampling_rate=speech_lines.RATE, return_tensors="pt").input_features  # fmt: skip
            prompts = torch.tensor([asked["prompt"]] * len(some))
            # Whisper's own `generate` adds rules, and passes for fallbacks: this one is faster.
            tokens = GenerationMixin.generate(
                model, input_features=features.to(dtype), decoder_input_ids=prompts, max_new_tokens=output, min_new_tokens=output,
                do_sample=False, num_beams=1,
            )  # fmt: skip
            found += tokens[:, prompts.shape[1] :].tolist()
        return found

    about = {"version": transformers.__version__, "torch": torch.__version__, "threads": torch.get_num_threads(), **asked["options"]}  # fmt: skip
    speech_lines.serve(answers, about, transcribe)


if __name__ == "__main__":
    main()
