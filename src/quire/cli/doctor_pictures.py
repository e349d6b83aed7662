"""What `quire doctor` says of pictures: the size of the vision tower, and the tokens of a picture.

Knows a checkpoint's JSON files, the headers of its weights, and Transformers' processor. Loads no weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from quire.config.engine import Resolved
from quire.models.checkpoint_files import TensorHeader, on_disk
from quire.models.vision import most_rows, vision_model, why_no_pictures
from quire.worker.memory_plan import size

TOWER = re.compile(r"(^|\.)(visual|vision_\w+|vit|vpm|multi_modal_projector|mlp1|embed_vision|connector|image_newline)\b")  # fmt: skip
SIDE = 1024


def picture_rows(
    resolved: Resolved, weights: Iterable[TensorHeader] | int
) -> list[tuple[str, str]]:
    """Lines of the section "Model"; none for a model that reads text only. `weights`: of the checkpoint; a number says nothing."""
    model = vision_model(resolved)
    if model is None:
        why = why_no_pictures(resolved)
        return [] if why.startswith("this model reads text") else [("pictures", f"refused: {why}")]
    known = () if isinstance(weights, int) else weights
    tower = on_disk(one for one in known if TOWER.search(one[0]))
    rows = [("vision tower", f"{size(tower)}, through Transformers")] if tower else []
    count = _tokens(resolved.path)
    if count is not None:
        rows.append((f"picture of {SIDE}x{SIDE}", f"{count} tokens"))
    videos = "pictures and videos" if model.video_token_id is not None else "pictures"
    rows.append((videos, f"at most {most_rows(resolved, model)} tokens each"))
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
