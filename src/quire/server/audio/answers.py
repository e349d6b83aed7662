"""Answers to transcriptions: json, text, srt, vtt, verbose_json, and the events of streams.

Knows shapes. Does not know how texts are made.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from starlette.responses import Response

from quire.frontend.transcription.segments import NO_SPACES, Segment, WindowText, joined
from quire.server.audio.transcription import TextDelta, Transcription
from quire.server.request_body import json_response
from quire.server.sse import DONE, EventEncoder, data


def segments_of(windows: Sequence[WindowText]) -> list[tuple[WindowText, Segment]]:
    return [(window, segment) for window in windows for segment in window.segments]


def cues_of(windows: Sequence[WindowText]) -> list[Segment]:
    """The segments that a subtitle shows."""
    return [segment for _, segment in segments_of(windows) if segment.text.strip()]


class TranscriptionAnswer(EventEncoder[TextDelta | WindowText]):
    """The answer to a transcription, streamed or in one piece."""

    def __init__(self, source: Transcription):
        self.source, self.body = source, source.body
        self.window = -1
        """Of a stream, the window whose text was sent last."""
        self.spaces = ""
        """At the end of its text, not sent yet."""
        self.num_segments = self.num_tokens = 0

    # -- in one piece -----------------------------------------------------------------------------
    async def response(self, windows: list[WindowText]) -> Response:
        source = self.source
        text = joined([window.text for window in windows], source.language)
        match self.body.response_format:
            case "text":
                return Response(text + "\n", media_type="text/plain")
            case "srt":
                return Response(srt(windows), media_type="text/plain")
            case "vtt":
                return Response(vtt(windows), media_type="text/vtt")
            case "verbose_json":
                return json_response(self._verbose(text, windows))
        answer: dict[str, Any] = {"text": text, "usage": self._usage()}
        if "logprobs" in self.body.include:
            answer["logprobs"] = [entry for window in windows for entry in self._logprobs(window)]
        return json_response(answer)

    def _usage(self) -> dict[str, Any]:
        return {"type": "duration", "seconds": self.source.seconds}

    def _verbose(self, text: str, windows: list[WindowText]) -> dict[str, Any]:
        source = self.source
        names = source.inputs.language_names
        code = source.language or "en"
        answer: dict[str, Any] = {
            "task": source.task, "language": names.get(code, code), "duration": round(source.sound.seconds, 3), "text": text,
        }  # fmt: skip
        wanted = self.body.timestamp_granularities or ["segment"]
        if "segment" in wanted:
            found = enumerate(segments_of(windows))
            answer["segments"] = [verbose_segment(id, *pair) for id, pair in found]
        if "word" in wanted:
            answer["words"] = [
                {"word": one.word, "start": round(one.start, 2), "end": round(one.end, 2)}
                for window in windows
                for one in window.words
            ]
        return {**answer, "usage": self._usage()}

    def _logprobs(self, window: WindowText) -> list[dict[str, Any]]:
        tokenizer = self.source.inputs.tokenizer
        return [
            {
                "token": tokenizer.piece(token),
                "logprob": score,
                "bytes": list(tokenizer.token_bytes(token)),
            }
            for token, score in window.logprobs
        ]

    # -- a stream ---------------------------------------------------------------------------------
    def add(self, item: TextDelta | WindowText) -> Iterable[bytes]:
        """The frames of new text, or of a window that is complete."""
        if isinstance(item, WindowText):
            if self.body.response_format == "verbose_json" and self.body.stream_format == "openai":
                for segment in item.segments:
                    yield data(self._segment_event(segment))
            return
        text = self._with_space(item)
        if not text:
            return
        self.num_tokens += item.num_tokens
        yield data(self._delta(text))

    def _with_space(self, item: TextDelta) -> str:
        """The new text, as it continues what was sent: windows are joined as in an answer in one piece."""
        is_new, is_first = item.window != self.window, self.window < 0
        text = item.text.lstrip() if is_new else self.spaces + item.text
        if not text.strip():
            self.spaces = "" if is_new else text
            return ""
        self.window, shown = item.window, text.rstrip()
        self.spaces = text[len(shown) :]
        needs_space = is_new and not is_first and self.source.language not in NO_SPACES
        return f" {shown}" if needs_space else shown

    def _segment_event(self, segment: Segment) -> dict[str, Any]:
        self.num_segments += 1
        return {
            "type": "transcript.text.segment", "id": f"seg_{self.num_segments - 1}", "start": round(segment.start, 2),
            "end": round(segment.end, 2), "text": segment.text,
        }  # fmt: skip

    def _delta(self, text: str) -> dict[str, Any]:
        if self.body.stream_format == "openai":
            return {"type": "transcript.text.delta", "delta": text}
        chunk = self._chunk([{"index": 0, "delta": {"content": text}, "finish_reason": None}])
        if self.body.stream_continuous_usage_stats:
            chunk["usage"] = self._token_usage()
        return chunk

    def end(self) -> Iterable[bytes]:
        """The whole text, or vLLM's last chunks."""
        text = joined([window.text for window in self.source.windows], self.source.language)
        if self.body.stream_format == "openai":
            yield data({"type": "transcript.text.done", "text": text, "usage": self._usage()})
        else:
            yield data(
                self._chunk([{"index": 0, "delta": {"content": ""}, "finish_reason": "stop"}])
            )
            if self.body.stream_include_usage:
                yield data({**self._chunk([]), "usage": self._token_usage()})
        yield DONE

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        source = self.source
        kind = "translation" if source.task == "translate" else "transcription"
        return {
            "id": source.id, "object": f"{kind}.chunk", "created": source.created, "model": source.context.model,
            "choices": choices,
        }  # fmt: skip

    def _token_usage(self) -> dict[str, int]:
        prompt, output = self.source.num_prompt, self.num_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
        }


def verbose_segment(id: int, window: WindowText, segment: Segment) -> dict[str, Any]:
    return {
        "id": id, "seek": round(window.offset * 100), "start": round(segment.start, 2), "end": round(segment.end, 2),
        "text": segment.text, "tokens": segment.tokens, "temperature": window.temperature,
        "avg_logprob": window.mean_logprob, "compression_ratio": window.compression, "no_speech_prob": window.no_speech or 0.0,
    }  # fmt: skip


def clock(seconds: float, mark: str) -> str:
    """00:00:01,500; `mark`: before the milliseconds."""
    whole = round(seconds * 1000)
    minutes, rest = divmod(whole, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02d}:{minutes:02d}:{rest // 1000:02d}{mark}{rest % 1000:03d}"


def cue_text(text: str) -> str:
    """On one line, and without what ends the times of a cue."""
    return " ".join(text.split()).replace("-->", "->")


def srt(windows: Sequence[WindowText]) -> str:
    """SubRip."""
    cues = [
        f"{number}\n{clock(s.start, ',')} --> {clock(s.end, ',')}\n{cue_text(s.text)}\n"
        for number, s in enumerate(cues_of(windows), 1)
    ]
    return "\n".join(cues)


def vtt(windows: Sequence[WindowText]) -> str:
    """WebVTT."""
    cues = [
        f"{clock(s.start, '.')} --> {clock(s.end, '.')}\n{cue_text(s.text).replace('&', '&amp;').replace('<', '&lt;')}\n"
        for s in cues_of(windows)
    ]
    return "\n".join(["WEBVTT\n", *cues])
