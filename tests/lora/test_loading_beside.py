"""Other requests go on while an adapter loads: its files are read beside the loop."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from equality.engines import BASE, greedy, make_checkpoint
from lora.adapters import PREFIX, collect, lora_engine, submit, write

from quire.features.lora import hook

LARGE = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16, "num_key_value_heads": 16, "num_hidden_layers": 5, "vocab_size": 4096}  # fmt: skip
RANK = 512


def test_streams_go_on_while_files_are_read(tmp_path: Path, monkeypatch: Any) -> None:
    """The reading does not end before the other streams have, so they cannot have waited for it."""
    path = make_checkpoint("llama", tmp_path / "model")
    write(tmp_path / "a", 4)
    read, go_on = hook.read_adapter, threading.Event()

    def slow(*args: Any) -> Any:
        assert go_on.wait(60)
        return read(*args)

    with lora_engine(path) as one:
        monkeypatch.setattr(hook, "read_adapter", slow)
        load = threading.Thread(target=one.client.call, args=("load_lora", "a", str(tmp_path / "a")))  # fmt: skip
        load.start()
        got = collect(one, [submit(one, [5, 6, 7], greedy(20)) for _ in range(3)])
        assert [outputs[-1].finish for outputs in got.values()] == ["length"] * 3
        assert load.is_alive()
        go_on.set()
        load.join(60)
        (outputs,) = collect(one, [submit(one, [5, 6, 7], greedy(4), "a")]).values()
        assert outputs[-1].finish == "length"


@pytest.mark.slow
def test_a_large_adapter_does_not_stall_a_stream(tmp_path: Path) -> None:
    """480 MB: the slowest step while it loads is bounded by the ordinary ones."""
    config = {**BASE, **LARGE, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5}  # fmt: skip
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    hidden, inner = LARGE["hidden_size"], LARGE["intermediate_size"]
    sizes = {f"self_attn.{part}_proj": (hidden, hidden) for part in "qkvo"}
    sizes |= {"mlp.gate_proj": (hidden, inner), "mlp.up_proj": (hidden, inner), "mlp.down_proj": (inner, hidden)}  # fmt: skip
    made = {}
    for layer in range(LARGE["num_hidden_layers"]):
        for module, (ins, outs) in sizes.items():
            name = f"{PREFIX}model.layers.{layer}.{module}.lora_"
            made[name + "A.weight"] = torch.randn(RANK, ins)
            made[name + "B.weight"] = torch.randn(outs, RANK)
    path = write(tmp_path / "large", RANK, made=made)
    assert (tmp_path / "large" / "adapter_model.safetensors").stat().st_size > 480_000_000
    settings = {"dtype": "bfloat16", "load_format": "dummy", "max_lora_rank": RANK, "max_model_len": 512}  # fmt: skip
    with lora_engine(str(tmp_path / "model"), **settings) as one:
        submit(one, [5, 6, 7], greedy(480))
        one.client.outputs()

        def gaps(until: Any) -> list[float]:
            found, last = [], time.perf_counter()
            while not until(found):
                one.client.outputs()
                found.append(time.perf_counter() - last)
                last += found[-1]
            return found

        ratios = []
        for _ in range(3):  # other work on the machine stalls steps too
            ordinary = max(gaps(lambda found: len(found) >= 30))
            load = threading.Thread(target=one.client.call, args=("load_lora", "large", path, True))
            load.start()
            during = gaps(lambda found, load=load: not load.is_alive())
            ratios.append(max(during) / ordinary)
            print(
                f"slowest step: {ordinary:.3f} s before, {max(during):.3f} s of {len(during)} during a load"
            )
            if ratios[-1] < 3:
                break
    assert min(ratios) < 3, ratios
    assert len(during) > 3
