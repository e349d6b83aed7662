"""Videos: the frames that are taken of a file, their patches, and tokens and logits compared with Transformers."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
import vision_checkpoints
from vision_checkpoints import CHECKPOINTS, as_file, damaged, picture
from vision_server import VisionServer, asking, data_url

from quire import SamplingParams
from quire.config.media import MediaConfig, media_reading
from quire.errors import ValidationError
from quire.frontend.media.prompt_reader import media_inputs
from quire.frontend.media.video_frames import UnreadVideo, packed_frames, read_video, sampled

COUNT = 8
KINDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")
OTHERS = ("glm4v", "gemma4", "gemma4_both_ways")
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, logprobs=10)
needs_av = pytest.mark.skipif(find_spec("av") is None, reason="PyAV is not installed")


def frames(count: int, width: int = 150, height: int = 90) -> np.ndarray:
    return np.stack([np.asarray(picture(number, width, height)) for number in range(count)])


def video_file(count: int, kind: str = "mp4", codec: str = "mpeg4", size: int = 64) -> bytes:
    """Frame i has the grey level 20 * i."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=4)
        stream.width = stream.height = size
        stream.pix_fmt = "yuv420p"
        for number in range(count):
            pixels = np.full((size, size, 3), 20 * number % 256, np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return file.getvalue()


def prompt_of(kind: str, text: str) -> str:
    pictures = text.replace("@", CHECKPOINTS[kind]["placeholder"])
    return "<s>" + pictures.replace("#", vision_checkpoints.video_placeholder(CHECKPOINTS[kind]))


def peer(path: str, processes: Any, prompt: list[int], pictures: list[Any], videos: list[Any], fps: float, most: int = 64) -> Any:  # fmt: skip
    """(greedy tokens, logits of the first) of Transformers for a prompt with all rows."""
    ids = torch.tensor([prompt])
    model = vision_checkpoints.transformers_model(path)
    config = model.config
    in_video = config.image_token_id if config.model_type == "glm4v" else config.video_token_id
    types = torch.where(ids == in_video, 2, (ids == config.image_token_id).int())
    given: dict[str, Any] = {"input_ids": ids, "mm_token_type_ids": types}
    made = [processes.process(as_file(one), "at") for one in pictures]
    made += [processes.process(packed_frames(one, fps), "at", 32, most) for one in videos]
    for one in made:
        for name, data in one.tensors.items():
            if name == "num_soft_tokens_per_image":  # for texts
                continue
            tensor = torch.frombuffer(bytearray(data.data), dtype=getattr(torch, data.dtype)).view(data.shape)  # fmt: skip
            given[name] = torch.cat([given[name], tensor]) if name in given else tensor
    if config.model_type == "qwen2_5_vl" and videos:
        given["second_per_grid_ts"] = [one.seconds for one in made if one.seconds]
    with torch.inference_mode():
        out = model.generate(
            **given, max_new_tokens=COUNT, do_sample=False, eos_token_id=None, pad_token_id=0, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
    return out.sequences[0, len(prompt) :].tolist(), out.logits[0][0].float().log_softmax(-1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("chunk", [0, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_logits_are_those_of_transformers(
    kind, chunk, engine: Callable[..., Any], checkpoint, same_process
):
    videos, pictures, fps = [frames(4), frames(3, 120, 90)], [picture(9)], 4.0
    data = {"video": [(one, {"fps": fps}) for one in videos], "image": pictures}
    prompt = {"prompt": prompt_of(kind, "a video # and @ and # too"), "multi_modal_data": data}
    with engine(kind, long_prefill_token_threshold=chunk) as llm:
        (out,) = llm.generate([prompt], GREEDY, use_tqdm=False)
        (again,) = llm.generate([prompt], GREEDY, use_tqdm=False)
    path = checkpoint(kind)
    expected, logprobs_V = peer(path, same_process(path), list(out.prompt_token_ids), pictures, videos, fps)  # fmt: skip
    assert list(out.outputs[0].token_ids) == list(again.outputs[0].token_ids) == expected
    for token, entry in out.outputs[0].logprobs[0].items():
        assert abs(entry.logprob - float(logprobs_V[token])) < 1e-3


@pytest.mark.parametrize("kind", OTHERS)
def test_videos_whose_frames_are_pictures(kind, engine, checkpoint, same_process):
    """Each frame has its rows between texts. Of GLM-4.1V they are tokens of pictures, which Transformers cannot tell apart."""
    videos, pictures = [frames(3, 120, 90)], [] if kind == "glm4v" else [picture(9)]
    text = "a video # here" if kind == "glm4v" else "a video # and @ here"
    data = {"video": [(one, {"fps": 0.5}) for one in videos], "image": pictures}
    prompt = {"prompt": prompt_of(kind, text), "multi_modal_data": data}
    path = checkpoint(kind)
    with engine(kind) as llm:
        (out,) = llm.generate([prompt], GREEDY, use_tqdm=False)
        (again,) = llm.generate([prompt], GREEDY, use_tqdm=False)
        most = media_inputs(llm.front).most_rows
    expected, logprobs_V = peer(path, same_process(path), list(out.prompt_token_ids), pictures, videos, 0.5, most)  # fmt: skip
    assert list(out.outputs[0].token_ids) == list(again.outputs[0].token_ids) == expected
    for token, entry in out.outputs[0].logprobs[0].items():
        assert abs(entry.logprob - float(logprobs_V[token])) < 1e-3


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen3_vl"])
def test_a_repeated_frame_has_the_patches_of_a_picture(kind, checkpoint, same_process):
    processes, one = same_process(checkpoint(kind)), picture(3, 100, 80)
    still = np.stack([np.asarray(one)] * 2)
    video = processes.process(packed_frames(still, 2.0), "at", 32, 64).tensors
    image = processes.process(as_file(one), "at").tensors
    assert bytes(video["pixel_values_videos"].data) == bytes(image["pixel_values"].data)
    assert bytes(video["video_grid_thw"].data) == bytes(image["image_grid_thw"].data)


def test_frames_are_made_small_enough_for_a_step(checkpoint, same_process):
    made = same_process(checkpoint("qwen2_vl")).process(packed_frames(frames(8), 2.0), "at", 8, 40)
    t, h, w = np.frombuffer(made.tensors["video_grid_thw"].data, np.int64)
    assert t == 4
    assert t * h * w // 4 <= 40


def test_the_number_of_frames_is_an_option():
    assert media_reading('{"video": {"num_frames": 4}}') == {"video": {"num_frames": 4}}
    assert media_reading({"image": {"image_mode": "RGB"}}) == {"image": {"image_mode": "RGB"}}
    with pytest.raises(ValueError, match="on white"):
        media_reading({"image": {"image_mode": "L"}})
    assert MediaConfig(media_io_kwargs={"video": {"num_frames": 4}}).num_frames == 4
    assert MediaConfig().num_frames == 32
    for wrong in ({"video": {"num_frames": 0}}, {"video": {"fps": 2}}, {"image": {"a": 1}}, {"video": {"num_frames": 1 << 20}}, []):  # fmt: skip
        with pytest.raises(ValueError, match="num_frames"):
            media_reading(wrong)


# -- files ----------------------------------------------------------------------------------------
def test_frames_are_sampled_evenly_with_the_first_and_the_last():
    assert sampled(10, 4) == [0, 3, 6, 9]
    assert sampled(3, 32) == [0, 1, 2]
    assert sampled(100, 1) == [0]


@needs_av
@pytest.mark.parametrize(("kind", "codec"), [("mp4", "mpeg4"), ("matroska", "mpeg4"), ("webm", "libvpx")])  # fmt: skip
def test_frames_of_files(kind, codec):
    video = read_video(video_file(11, kind, codec), 6, 1 << 20)
    assert video.indices == [0, 2, 4, 6, 8, 10]
    assert abs(video.fps - 4) < 0.1
    for frame_HWC, index in zip(video.frames, video.indices, strict=True):
        assert frame_HWC.shape == (64, 64, 3)
        assert abs(float(frame_HWC.mean()) - 20 * index) < 12


@needs_av
def test_what_is_no_video_is_refused():
    for file in (as_file(picture(1)), b"", b"#EXTM3U\nfile:///etc/passwd\n", video_file(3, "avi")):
        with pytest.raises(UnreadVideo, match="format"):
            read_video(file, 4, 1 << 20)
    with pytest.raises(UnreadVideo, match="pixels"):
        read_video(video_file(3), 4, 1000)


@needs_av
def test_too_many_frames_are_counted_and_not_decoded(monkeypatch):
    monkeypatch.setattr("quire.frontend.media.video_frames.MOST_FRAMES", 5)
    with pytest.raises(UnreadVideo, match="frames"):
        read_video(video_file(9), 4, 1 << 20)


@pytest.fixture(scope="module")
def server(checkpoint: Any, same_process: Any) -> Iterator[VisionServer]:
    path = checkpoint("qwen2_vl")
    made = VisionServer(path, same_process(path), limit_mm_per_prompt={"video": 2})
    yield made
    made.close()


def video_part(url: Any) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url}}


@needs_av
def test_videos_over_http(server):
    part = video_part(data_url(video_file(6), "video/mp4"))
    found = server.ask(
        "/v1/chat/completions", asking(part, {"type": "text", "text": "What is it?"})
    )
    assert found.status_code == 200, found.text
    assert found.json()["usage"]["prompt_tokens"] > 20
    bare = {"type": "video_url", "video_url": part["video_url"]["url"]}
    same = server.ask("/v1/chat/completions", asking(bare, {"type": "text", "text": "What is it?"}))
    assert same.json()["choices"][0]["token_ids"] == found.json()["choices"][0]["token_ids"]


@needs_av
def test_wrong_videos_get_an_error_with_their_place(server):
    message, where = server.refused(video_part(data_url(as_file(picture(1)))))
    assert ("MP4, WebM or" in message, where) == (True, "messages[0].content[0].video_url.url")
    good = video_part(data_url(video_file(2), "video/mp4"))
    message, where = server.refused(good, good, good)
    assert ("the limit is 2" in message, where) == (True, "messages[0].content[2].video_url.url")
    draw, file, codes = random.Random(3), video_file(5), set[int]()
    for _ in range(30):
        part = video_part(data_url(damaged(file, draw)))
        codes.add(server.ask("/v1/chat/completions", asking(part, max_tokens=1)).status_code)
    assert codes <= {200, 400}
    assert 400 in codes


def test_a_model_without_videos_says_so(engine):
    prompt = {"prompt": "<s>a", "multi_modal_data": {"video": frames(2)}}
    with engine("llava") as llm, pytest.raises(ValidationError, match="no videos"):
        llm.generate([prompt], GREEDY, use_tqdm=False)


@pytest.mark.attack
@needs_av
@pytest.mark.parametrize(("kind", "codec"), [("mp4", "mpeg4"), ("webm", "libvpx")])
def test_two_thousand_damaged_videos(kind, codec, checkpoint, processes):
    """In real processes: each is read or refused, and the last good one is read."""
    made, draw = processes(checkpoint("qwen2_vl")), random.Random(7)
    file, said = video_file(6, kind, codec), list[str]()
    for _ in range(2000):
        try:
            made.process(damaged(file, draw), "at", 8, 64)
        except ValidationError as error:
            said.append(str(error))
    assert all(text.startswith("`at`: ") for text in said)
    assert made.process(file, "at", 8, 64).tensors
