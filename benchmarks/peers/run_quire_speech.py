"""Quire's Whisper, samples in and tokens out: see speech_lines.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lines
import speech_lines

sys.path.insert(0, str(Path(__file__).parents[2]))  # the script's own folder is first on the path


def main() -> None:
    asked = speech_lines.asked()
    answers = lines.own_output()
    import torch

    import quire
    from quire import LLM, SamplingParams

    llm = LLM(
        asked["model"], max_num_seqs=asked["rows"], disable_log_stats=True, **asked["options"]
    )

    def transcribe(sound: list[Any], output: int) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=output, min_tokens=output, ignore_eos=True, detokenize=False)  # fmt: skip
        prompts = [{"prompt_token_ids": asked["prompt"], "multi_modal_data": {"audio": (one, speech_lines.RATE)}} for one in sound]  # fmt: skip
        llm.reset_encoder_cache()
        return [list(out.outputs[0].token_ids) for out in llm.generate(prompts, params, use_tqdm=False)]  # fmt: skip

    about = {"version": quire.__version__, "torch": torch.__version__, "threads": torch.get_num_threads(), **asked["options"]}  # fmt: skip
    speech_lines.serve(answers, about, transcribe)
    llm.shutdown()


if __name__ == "__main__":
    main()
