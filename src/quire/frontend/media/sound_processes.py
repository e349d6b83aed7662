"""The processes that decode sound and make spectrograms (`sound_process.py`). Blocks: call them in a thread."""

from __future__ import annotations

from typing import Any

import numpy as np

from quire import env
from quire.frontend.media.decoding_processes import MEMORY, DecodingProcesses
from quire.frontend.media.errors import refused
from quire.frontend.media.sound_messages import (
    BeginSound,
    Decode,
    Decoded,
    SoundRefused,
    Transform,
    Transformed,
    decode,
    encode,
)
from quire.processes.isolated_child import ProcessEnded
from quire.protocol.tensor_data import TensorData

CPU_S = 30.0  # processor time of a file, or of a spectrogram
TOO_MUCH = (
    f"the sound takes more than {CPU_S:g} s or {MEMORY >> 20} MiB to decode: send a shorter one"
)


class SoundProcesses(DecodingProcesses):
    module = "quire.frontend.media.sound_process"
    environment = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # noqa: RUF012
    what = "sound"

    def __init__(self, count: int | None = None, memory: int = MEMORY):
        super().__init__(count or max(1, int(env.get("MAX_AUDIO_PREPROCESS_WORKERS"))), memory)

    def read(self, data: bytes, where: str, rate: int, window: int) -> Decoded:
        """The samples of a file. `window`: see `Decode`.

        Raises:
            ValidationError: the file is no sound that this server reads, or has too much.
        """
        seconds, most = env.get("MAX_AUDIO_DECODE_DURATION_S"), env.get("MAX_AUDIO_DECODE_BYTES")
        message = encode(Decode(data, rate, float(seconds), int(most), window, CPU_S))
        answer = self._answer(message, where)
        if not isinstance(answer, Decoded):
            raise refused(where, "the sound could not be decoded")
        return answer

    def spectrogram(self, samples_N: np.ndarray, mels: int, frames: int, where: str) -> TensorData:
        """float32 [mels, frames]. Raises ValidationError: it takes too much."""
        samples_N = np.ascontiguousarray(samples_N, np.float32)
        data = TensorData("float32", samples_N.shape, samples_N.view(np.uint8).data)
        answer = self._answer(encode(Transform(data, mels, frames, CPU_S)), where)
        if not isinstance(answer, Transformed):
            raise refused(where, "the sound could not be processed")
        return answer.mel

    def _answer(self, message: bytes, where: str) -> Any:
        try:
            answer = self.ask(message)
        except ProcessEnded:
            raise refused(where, TOO_MUCH) from None
        if isinstance(answer, SoundRefused):
            raise refused(where, why(answer.why, answer.detail))
        return answer

    def first_message(self) -> bytes:
        """See `DecodingProcesses`."""
        return encode(BeginSound(self.memory))

    def decode(self, answer: bytearray) -> Any:
        """See `DecodingProcesses`."""
        return decode(answer)


def why(reason: str, detail: str) -> str:
    """Why a file is refused, for the client. Arguments as in `SoundRefused`."""
    match reason:
        case "format":
            return "this is no sound that this server reads: send WAV, FLAC, MP3, OGG, M4A or WebM"
        case "extra":
            return f"{detail} need packages that this server lacks: pip install quire[audio], or send WAV of 16000 Hz"
        case "seconds":
            limit = env.get("MAX_AUDIO_DECODE_DURATION_S")
            return f"the sound has {detail} s; the limit is {limit} (QUIRE_MAX_AUDIO_DECODE_DURATION_S): send it in parts"
        case "bytes":
            limit = env.get("MAX_AUDIO_DECODE_BYTES")
            return f"the sound has more than {limit} bytes when it is decoded (QUIRE_MAX_AUDIO_DECODE_BYTES): send fewer channels, a lower rate, or parts"
        case "empty":
            return "the file has no sound"
        case "memory":
            return TOO_MUCH
    return "the sound is damaged, and cannot be decoded"
