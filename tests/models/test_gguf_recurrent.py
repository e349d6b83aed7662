"""GGUF files of models with recurrent layers, against the checkpoints that they were made of.

Decays are stored as they are used, so their logarithms are rounded; and Falcon-H1's factors are in its tensors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.errors import ConfigError
from quire.models.gguf.families import config_of
from quire.models.gguf.header import GgufHeader, read_header
from tests.models.cases import Case, write
from tests.models.gguf_files import GgufCopy
from tests.models.gguf_recurrent import RecurrentCopy
from tests.models.harness import Runner
from tests.models.recurrent_cases import CASES
from tests.models.test_gguf import PROMPT, build

NETS = {"num_hidden_layers": 4, "layer_types": [*["linear_attention"] * 3, "full_attention"]}
CHANGES: dict[str, dict[str, Any]] = {  # what files of these families do not say
    "qwen3_5": NETS, "qwen3_5 one head": NETS, "qwen3_5 moe": NETS,
    "lfm2": {}, "lfm2 moe": {"tie_word_embeddings": True},
    "mamba": {}, "falcon_mamba": {"use_bias": False, "mixer_rms_eps": 1e-6}, "mamba2": {},
    "granite 4 h": {"position_embedding_type": "nope"}, "granite 4 h dense": {},
    "nemotron h": {},
    "nemotron h, dense": {"layers_block_type": ["mamba", "attention", "mlp"]}, "nemotron h latent": {"n_group": 1, "mlp_bias": False},
    "jamba": {},
    "falcon h1": {}, "falcon h1 norm": {"mamba_norm_before_gate": False},
    "qwen3 next": {**NETS, "norm_topk_prob": True, "mlp_only_layers": []}, "qwen3 next r=1": NETS,
}  # fmt: skip
OURS = ("qwen3_5", "lfm2")


@pytest.mark.parametrize("name", CHANGES)
def test_a_file_gives_the_logits_of_its_checkpoint(name: str, tmp_path: Path) -> None:
    case = next(each for each in CASES if each.name == name.partition(",")[0])
    write(Case(name, case.kind, {**case.config, **CHANGES[name]}), tmp_path / "st")
    wanted = Runner(build(tmp_path / "st")).prefill(0, PROMPT)
    copies = [(GgufCopy if name.startswith(OURS) else RecurrentCopy)(tmp_path / "st")]
    if name == "qwen3 next":
        copies.append(RecurrentCopy(tmp_path / "st", first=True))
    for number, copy in enumerate(copies):
        file = copy.write(tmp_path / f"{number}.gguf")
        got = Runner(build(file)).prefill(0, PROMPT)
        assert (got - wanted).abs().max() < 1e-4 * max(1.0, float(wanted.abs().max()))


def test_layers_that_a_file_does_not_explain_are_refused(tmp_path: Path) -> None:
    """Attention at no fixed interval, which Jamba's config.json cannot say; a layer without a mixer."""
    for name, left_out, said in (
        ("jamba", "blk.1.ffn_gate_inp.weight", "at no fixed interval"),
        ("nemotron h", "blk.3.ffn_up.weight", "layer 3 has no tensor"),
    ):
        case = next(each for each in CASES if each.name == name)
        layers = {"num_hidden_layers": 6} if name == "jamba" else {}
        write(Case(name, case.kind, {**case.config, **layers}), tmp_path / name)
        whole = read_header(RecurrentCopy(tmp_path / name).write(tmp_path / f"{name}.gguf"))
        config_of(whole)
        left = tuple(each for each in whole.tensors if each.name != left_out)
        with pytest.raises(ConfigError, match=said):
            config_of(GgufHeader(whole.files, whole.metadata, left))
