"""Videos for towers: each frame is resized and normalized as a picture. In the Qwen form groups of frames share patches; in the form of
Gemma 4 each frame is encoded alone.

Runs in a picture process. Transformers' processors of videos need torchvision; those of pictures do not, and give the same patches for
a frame that is repeated. Knows frames, and image processors of these two forms.

Shape suffixes: N patches of a frame, C colours, T frames that share a patch, P pixels of a patch in one colour.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from quire.frontend.media.video_frames import Video, sampled

SOFT_TOKENS = 70  # of a frame, as Gemma 4 is trained
TEXT_OF_FRAME = 12  # tokens at most: its time and its markers


def video_tensors(
    video: Video, processor: Any, max_rows: int, options: dict[str, Any] | None = None
) -> tuple[dict[str, np.ndarray], str, float]:
    """(what the tower takes, the text that replaces the placeholder, seconds from one group of frames to the next).

    `max_rows`: of the tower, for the whole video; its frames are made small enough. `options`: of the processor.

    Raises:
        Exception: the processor refuses frames of this shape, in its own way.
    """
    if hasattr(processor.image_processor, "temporal_patch_size"):
        return _grouped(video, processor, max_rows, options or {})
    return _alone(video, processor, max_rows, options or {})


def _alone(
    video: Video, processor: Any, max_rows: int, options: dict[str, Any]
) -> tuple[dict[str, np.ndarray], str, float]:
    """As `video_tensors`; fewer frames are taken if all of them have too many rows."""
    soft = int(options.get("max_soft_tokens", SOFT_TOKENS))
    most = max(max_rows // (soft + TEXT_OF_FRAME), 1)
    kept = sampled(len(video.frames), most)
    video = Video([video.frames[i] for i in kept], [video.indices[i] for i in kept], video.fps)
    made = [
        processor.image_processor([frame_HWC], **options | {"max_soft_tokens": soft}, return_tensors="np", input_data_format="channels_last")
        for frame_HWC in video.frames
    ]  # fmt: skip
    tensors = {
        "pixel_values_videos": np.concatenate([one["pixel_values"] for one in made]),
        "video_position_ids": np.concatenate([one["image_position_ids"] for one in made]),
        "num_frames_per_video": np.array([len(made)], np.int64),
    }
    rows = int(made[0]["num_soft_tokens_per_image"][0])
    return tensors, _text(video, processor, {"num_soft_tokens_per_video": [rows]}), _seconds(video)


def _grouped(
    video: Video, processor: Any, max_rows: int, options: dict[str, Any]
) -> tuple[dict[str, np.ndarray], str, float]:
    """As `video_tensors`."""
    own = processor.image_processor
    group, merge = int(own.temporal_patch_size), int(own.merge_size)
    frames = list(video.frames)
    frames += [frames[-1]] * (-len(frames) % group)
    num_groups = len(frames) // group
    side = int(own.patch_size) * merge
    most = max(max_rows // num_groups, 1) * side**2
    given = {**dict(own.size), **options.get("size", {})}
    low = options.get("min_pixels", given["shortest_edge"])
    high = options.get("max_pixels", given["longest_edge"])
    size = {"shortest_edge": min(low, most), "longest_edge": min(high, most)}
    parts, grid = [], np.zeros(3, np.int64)
    for frame_HWC in frames:
        made = own([frame_HWC], size=size, return_tensors="np", input_data_format="channels_last")
        grid = made["image_grid_thw"][0]
        values = made["pixel_values"]
        parts.append(values.reshape(len(values), frame_HWC.shape[2], group, -1))
    groups = [
        np.stack([parts[first + i][:, :, i] for i in range(group)], 2).reshape(len(parts[0]), -1)
        for first in range(0, len(parts), group)
    ]
    grid_13 = np.array([[num_groups, grid[1], grid[2]]], np.int64)
    tensors = {"pixel_values_videos": np.concatenate(groups), "video_grid_thw": grid_13}
    processor.video_processor = SimpleNamespace(merge_size=merge, temporal_patch_size=group)
    text = _text(video, processor, {"video_grid_thw": grid_13})
    return tensors, text, group * _seconds(video)


def _seconds(video: Video) -> float:
    """From a sampled frame to the next."""
    steps = max(len(video.indices) - 1, 1)
    return (video.indices[-1] - video.indices[0]) / steps / video.fps


def _text(video: Video, processor: Any, given: dict[str, Any]) -> str:
    indices, fps = list(video.indices), video.fps
    metadata = SimpleNamespace(
        fps=fps, frames_indices=indices, timestamps=[i / fps for i in indices]
    )
    text: str = processor.replace_video_token(given | {"video_metadata": [metadata]}, 0)
    return text
