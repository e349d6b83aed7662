"""`python -m benchmarks towers`: vision towers beside Transformers' (sdpa), in bfloat16, with the same random weights.

Two towers, cut to 8 layers: Qwen2.5-VL-3B's, of whose layers one in eight attends to the whole picture, and SigLIP-so400m, of which
all do. Pictures of 448x448 and 1344x1344, one in a pass. Both towers are in this process and take turns, so that other load on the
machine slows both; medians of the rounds' ratios count. Aim: 1.5 times as fast as Transformers. Under 4 minutes on 2 cores.

Shape suffixes: T patches, D features.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import roofline
from benchmarks.result_files import commit, free_name

if TYPE_CHECKING:
    from torch import Tensor

AIM = 1.5
SIDES = (448, 1344)
QWEN, SIGLIP = "qwen2.5-vl-3b", "siglip-so400m"
LAYERS = 8
PATCH = 14


@dataclass(frozen=True, slots=True)
class TowerSize:
    """Of a tower."""

    hidden: int
    inner: int
    heads: int
    layers: int
    width: int = 2048

    @property
    def common(self) -> dict[str, Any]:
        return {"hidden_size": self.hidden, "intermediate_size": self.inner, "patch_size": PATCH}


SIZES: Mapping[str, TowerSize] = {
    QWEN: TowerSize(1280, 3420, 16, LAYERS),
    SIGLIP: TowerSize(1152, 4304, 16, LAYERS),
}


@dataclass(slots=True)
class Pair:
    """The same tower twice, and what runs each on a picture."""

    ours: Callable[[], Tensor]
    peer: Callable[[], Tensor]


def pair(name: str, size: TowerSize, side: int) -> Pair:
    """Of a tower, and a picture of side x side."""
    import torch

    torch.manual_seed(0)
    return (_qwen if name == QWEN else _siglip)(size, side)


def _qwen(size: TowerSize, side: int) -> Pair:
    import torch
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
        Qwen2_5_VisionTransformerPretrainedModel as Peer,
    )
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLVisionConfig

    from quire.models.vision_towers.qwen_vl import Qwen25Tower
    from quire.protocol.media import TowerInput

    own = {
        **size.common, "depth": size.layers, "num_heads": size.heads, "out_hidden_size": size.width, "window_size": 112,
        "fullatt_block_indexes": list(range(7, size.layers, 8)) or [size.layers - 1],
    }  # fmt: skip
    peer = Peer._from_config(Qwen2_5_VLVisionConfig(**own, attn_implementation="sdpa"), dtype=torch.bfloat16).eval()  # fmt: skip
    tower = _tower(Qwen25Tower, {"vision_config": own}, size.width, peer, "visual.")
    count = side // PATCH
    pixels_TI, grid = torch.randn(count**2, 3 * 2 * PATCH**2), torch.tensor([[1, count, count]])
    item = TowerInput([(0, count**2 // 4)], [], {"pixel_values": _data(pixels_TI), "image_grid_thw": _data(grid)})  # fmt: skip
    given = pixels_TI.bfloat16()
    return Pair(lambda: tower.encode([item])[0], lambda: peer(given, grid_thw=grid).pooler_output)


def _siglip(size: TowerSize, side: int) -> Pair:
    import torch
    from transformers import SiglipVisionConfig, SiglipVisionModel

    from quire.models.vision_towers.patch_transformer import PatchTransformer
    from quire.models.vision_towers.tiles import TileTower
    from quire.protocol.media import TowerInput

    class States(TileTower):
        """The states after the last norm."""

        def __init__(self, config: Mapping[str, Any], width: int):
            super().__init__()
            self.vision = PatchTransformer(config, None)

        def rows(self, item: TowerInput, states_PLD: Tensor) -> Tensor:
            return states_PLD.flatten(0, 1)

    own = {
        **size.common, "num_hidden_layers": size.layers, "num_attention_heads": size.heads, "image_size": side,
        "vision_use_head": False,
    }  # fmt: skip
    config = SiglipVisionConfig(**own, attn_implementation="sdpa")
    peer = SiglipVisionModel._from_config(config, dtype=torch.bfloat16).eval()
    tower = _tower(States, {**own, "model_type": "siglip_vision_model"}, size.width, peer, "vision_tower.")  # fmt: skip
    pixels = torch.randn(1, 3, side, side)
    item = TowerInput([], [], {"pixel_values": _data(pixels)})
    given = pixels.bfloat16()
    return Pair(lambda: tower.encode([item])[0], lambda: peer(given).last_hidden_state[0])


def _tower(kind: Any, config: Mapping[str, Any], width: int, peer: Any, prefix: str) -> Any:
    """Quire's tower with the peer's weights."""
    import torch

    from quire.layers.weights import weights_of
    from quire.models.construction import construction
    from quire.models.vision_towers.load import fill_tower
    from quire.native.fused_decoder import fuse_model
    from quire.ops.dispatch import bind
    from quire.platforms.base import platform_of
    from quire.quantization.apply import pack_weights

    with construction(torch.bfloat16):
        tower = kind(config, width).eval()
    weights = ((prefix + name, tensor) for name, tensor in peer.state_dict().items())
    fill_tower(tower, weights, torch.device("cpu"), "the peer")
    bind(platform_of("cpu").kernels)
    pack_weights(weights_of(tower))
    fuse_model(tower)
    return tower


def _data(tensor: Tensor) -> Any:
    from quire.protocol.tensor_data import TensorData

    array = tensor.numpy()
    return TensorData(str(array.dtype), array.shape, array.tobytes())


def measure(towers: Pair, rounds: int, seconds: float) -> dict[str, Any]:
    """Seconds of both by round, of at most `rounds`, and fewer (at least 3) if they take longer than `seconds`."""
    import torch

    took: dict[str, list[float]] = {"quire": [], "transformers": []}
    with torch.inference_mode():
        ours, peer = towers.ours().float(), towers.peer().float()  # warms up
        cosine = torch.cosine_similarity(ours, peer, dim=-1)
        began = time.perf_counter()
        for number in range(rounds):
            calls = [("quire", towers.ours), ("transformers", towers.peer)]
            for name, run in calls if number % 2 else calls[::-1]:
                start = time.perf_counter()
                run()
                took[name].append(time.perf_counter() - start)
            if number >= 2 and time.perf_counter() - began > seconds:
                break
    return report(took) | {"least_cosine": round(float(cosine.min()), 5)}


def report(took: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Medians, and how many times as fast Quire is: the median of the rounds' ratios."""
    ratios = [peer / ours for ours, peer in zip(took["quire"], took["transformers"], strict=True)]
    speed = statistics.median(ratios)
    return {
        "median_s": {name: round(statistics.median(each), 4) for name, each in took.items()},
        "times_as_fast": round(speed, 3),
        "lowest_and_highest": [round(min(ratios), 3), round(max(ratios), 3)],
        "rounds": len(ratios),
        "aim_met": speed >= AIM,
    }


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks towers", description=__doc__)
    parser.add_argument("--sides", type=int, nargs="+", default=SIDES, help="of pictures, in pixels: multiples of 28")  # fmt: skip
    parser.add_argument("--towers", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=30, help="of each tower and size, about")
    parser.add_argument("--out", type=Path, help="folder of results; unset: only printed")
    asked = parser.parse_args(argv)
    found: dict[str, Any] = {}
    for name in asked.towers:
        for side in asked.sides:
            case = measure(pair(name, SIZES[name], side), asked.rounds, asked.seconds)
            found[f"{name} {side}x{side}"] = case
            print(f"{name} {side}x{side}: {json.dumps(case)}", flush=True)
    if asked.out is not None:
        about = roofline.describe()
        date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
        command = " ".join(["python -m benchmarks towers", *argv])
        asked.out.mkdir(parents=True, exist_ok=True)
        path = free_name(asked.out, f"{date}-towers-{roofline.slug(about)}")
        kept = {"date": date, "command": command, "commit": commit(), "machine": about, "layers": LAYERS, **found}  # fmt: skip
        path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        print(f"result in {path}")
    return 0
