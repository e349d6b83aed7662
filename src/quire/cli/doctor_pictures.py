"""What `quire doctor` says of pictures and sound: the sizes of the towers, and the tokens of a picture and of a second of sound.

Knows a checkpoint's JSON files, the headers of its weights, and Transformers' processor. Loads no weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from quire.config.engine import Resolved
from quire.models.audio_tower import audio_model, why_no_audio
from quire.models.checkpoint_files import TensorHeader, on_disk
from quire.models.media import media_model, most_rows
from quire.models.vision import vision_model, why_no_pictures
from quire.worker.memory_plan import size

TOWER = re.compile(r"(^|\.)(visual|vision_\w+|vit|vpm|multi_modal_projector|mlp1|embed_vision|connector|image_newline)\b")  # fmt: skip
HEARS_TOO = re.compile(r"(^|\.)(audio_\w+|embed_audio)\b")
HEARS = re.compile(r"(^|\.)(audio_\w+|multi_modal_projector|encoder|projector)\b")
"""Of models without a vision tower."""
SIDE = 1024


def picture_rows(
    resolved: Resolved, weights: Iterable[TensorHeader] | int
) -> list[tuple[str, str]]:
    """Lines of the section "Model"; none for a model that reads text only. `weights`: of the checkpoint; a number says nothing."""
    media, known = media_model(resolved), () if isinstance(weights, int) else tuple(weights)
    rows = _of_pictures(resolved, known)
    if (audio := audio_model(resolved)) is not None and media is not None:
        pattern = HEARS if media.vision is None else HEARS_TOO
        tower = on_disk(one for one in known if pattern.search(one[0]))
        rows += [("audio tower", f"{size(tower)}, through Transformers")] if tower else []
        most = f"at most {audio.most_seconds:g} s and {most_rows(resolved, media)} tokens each"
        rows.append(("sound", most))
    elif not (why := why_no_audio(resolved)).startswith("this model takes no sound"):
        rows.append(("sound", f"refused: {why}"))
    return rows


def _of_pictures(resolved: Resolved, known: Sequence[TensorHeader]) -> list[tuple[str, str]]:
    model, media = vision_model(resolved), media_model(resolved)
    if model is None or media is None:
        why = why_no_pictures(resolved)
        return [] if why.startswith("this model reads text") else [("pictures", f"refused: {why}")]
    tower = on_disk(one for one in known if TOWER.search(one[0]))
    through = "" if model.native else ", through Transformers"
    rows = [("vision tower", size(tower) + through)] if tower else []
    count = _tokens(resolved.path)
    if count is not None:
        rows.append((f"picture of {SIDE}x{SIDE}", f"{count} tokens"))
    videos = "pictures and videos" if model.video_token_id is not None else "pictures"
    rows.append((videos, f"at most {most_rows(resolved, media)} tokens each"))
    return rows


def _tokens(folder: str) -> int | None:
    """Of a picture of SIDE x SIDE, without pixels; None: the processor cannot say."""
    from quire.frontend.media.media_process import load_processor

    try:
        processor: Any = load_processor(folder)
        return int(processor._get_num_multimodal_tokens(image_sizes=[(SIDE, SIDE)]).num_image_tokens[0])  # fmt: skip
    except (
        Exception
    ):  # a damaged file raises anything; the picture processes log it when the server starts
        return None
