"""TranscriptionReader: reads the sound in prompts of programs, for a model that writes down speech.

Knows `TranscriptionInputs` and the frontend's input processor. Does not know HTTP.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.config.engine import Resolved
from quire.errors import ValidationError
from quire.frontend.input_processor import InputProcessor, TokenizeOptions
from quire.frontend.media.sound_inputs import SoundInputs
from quire.frontend.prompt_reader import PromptReader
from quire.frontend.prompts import Prompt
from quire.frontend.transcription.inputs import FEATURE, TranscriptionInputs
from quire.models.sound import transcriber

if TYPE_CHECKING:
    from quire.frontend.request_manager import RequestManager

NO_SOUND = 'this model writes down speech: send a sound file to /v1/audio/transcriptions, or pass multi_modal_data={"audio": ...}'


class TranscriptionReader(PromptReader):
    """`windows` makes the prompts of windows of sound; None: there is no tokenizer."""

    def __init__(self, resolved: Resolved, inputs: InputProcessor):
        super().__init__(resolved, inputs)
        model = transcriber(resolved)
        self.windows: TranscriptionInputs | None = None
        if model is not None and (tokenizer := inputs.tokenizer) is not None:
            sound, length = SoundInputs(), inputs.max_model_len
            self.windows = TranscriptionInputs(model, tokenizer, sound, length)

    def prepare(self) -> None:
        if self.windows is not None:
            self.windows.prepare()

    def takes(self, prompt: Prompt) -> bool:
        return self.windows is not None and not prompt.media

    def read(self, prompt: Prompt, tokenization: Any) -> Prompt:
        if self.windows is None:
            return prompt
        if not prompt.items:
            raise ValidationError(NO_SOUND)
        plain = Prompt(prompt.text, prompt.tokens, prompt.salt)
        tokens = self.inputs.tokenize(plain, TokenizeOptions(add_special_tokens=False)).tokens
        return self.inputs.checked(self.windows.given(prompt, tokens))

    def check_route(self, what: str) -> None:
        if self.windows is not None and what.startswith("/"):
            raise ValidationError(NO_SOUND)


def transcription_inputs(front: RequestManager) -> TranscriptionInputs | None:
    """What makes prompts of sound; None: the model is for something else."""
    reader = front.readers.get(FEATURE)
    return reader.windows if isinstance(reader, TranscriptionReader) else None


def need_transcription(front: RequestManager, what: str) -> TranscriptionInputs:
    """Raises ValidationError: `what` needs a model that writes down speech."""
    windows = transcription_inputs(front)
    if windows is None:
        raise ValidationError(f"{what} needs a model that writes down speech: serve one, such as openai/whisper-small")  # fmt: skip
    return windows
