"""Training, going on with it, and publishing: the same numbers as Transformers, and the same bytes twice."""

from __future__ import annotations

import hashlib
import json
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quire.models.checkpoint_locator import EMBEDDED
from tools.tiny_model import adapter, embedder, export, train
from tools.tiny_model.model import Network, Shape
from tools.tiny_model.published import language_model

MODEL = EMBEDDED / "quire-tiny"
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


def _asked(run: Path, **changes: object) -> Namespace:
    asked = dict(
        run=run,
        tokenizer=MODEL,
        start=None,
        shape=json.dumps(SMALL),
        steps=4,
        decay=0.3,
        batch=1024,
        matrix_rate=0.02,
        other_rate=3e-3,
        seed=1,
        save=100,
        threads=1,
        device="cpu",
        dtype="float32",
        factors="{}",
    )
    return Namespace(**asked | changes)


def _digest(folder: Path) -> dict[str, str]:
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(folder.iterdir())}


@pytest.fixture
def cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cards").mkdir()
    (tmp_path / "cards" / "out.md").write_text("{{parameters}} {{tokens}} {{steps}}\n{{figures}}\n")
    monkeypatch.setattr(export, "CARDS", tmp_path / "cards")


def test_train_go_on_and_publish(tmp_path: Path, cards: None, capsys: pytest.CaptureFixture[str]):
    train.main(_asked(tmp_path / "run"))
    train.main(_asked(tmp_path / "run", steps=6))
    assert "from step 4 to 6" in capsys.readouterr().out
    export.export(tmp_path / "run", MODEL, tmp_path / "out")
    digests = _digest(tmp_path / "out")
    export.export(tmp_path / "run", MODEL, tmp_path / "out")
    assert _digest(tmp_path / "out") == digests
    assert " 6\n<!-- figures -->" in (tmp_path / "out" / "README.md").read_text()
    train.main(_asked(tmp_path / "more", start=tmp_path / "out", tokenizer=None, steps=1))
    assert (tmp_path / "more" / "state.pt").exists()


def test_the_training_network_equals_transformers():
    shape = train.shape_of(MODEL)
    network = Network(shape)
    train.load_weights(network, MODEL)
    theirs = language_model(MODEL)
    tokens = torch.randint(0, shape.vocab_size, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        ours = network.logits(network(tokens, torch.zeros_like(tokens)))
        torch.testing.assert_close(ours, theirs(tokens).logits, atol=2e-4, rtol=1e-4)


def test_documents_of_a_row_do_not_see_each_other():
    torch.manual_seed(0)
    network = Network(Shape(**SMALL))
    tokens = torch.randint(0, 1536, (1, 20))
    documents = torch.tensor([[0] * 8 + [1] * 12])
    alone = network(tokens[:, 8:], documents[:, 8:])
    torch.testing.assert_close(network(tokens, documents)[:, 8:], alone, atol=1e-5, rtol=1e-5)


def test_an_adapter_merged_is_the_adapter_attached(tmp_path: Path, cards: None):
    torch.manual_seed(0)
    network = Network(Shape(**SMALL))
    merged = {name: weight.clone() for name, weight in network.state_dict().items()}
    adapters = adapter.attach(network)
    assert len(adapters) == 2 * len(adapter.TARGETS)
    for each in adapters.values():  # values that bfloat16 holds exactly
        each.lora_A.data = each.lora_A.data.bfloat16().float()
        each.lora_B.data = torch.randn_like(each.lora_B).bfloat16().float() * 0.125
    adapter.write(tmp_path / "out", adapters, "small", 0)
    adapter.merge(merged, load_file(tmp_path / "out" / "adapter_model.safetensors"))
    plain = Network(Shape(**SMALL))
    plain.load_state_dict(merged)
    tokens = torch.arange(12)[None]
    documents = torch.zeros_like(tokens)
    torch.testing.assert_close(
        network(tokens, documents), plain(tokens, documents), atol=1e-4, rtol=1e-4
    )


def test_rates_rise_stay_and_fall():
    rates = [train.factor(step, 1000, 0.3) for step in range(1001)]
    assert rates[0] == pytest.approx(1 / train.WARM_UP)
    assert rates[400] == 1.0
    assert rates[850] == pytest.approx(0.5)
    assert rates[1000] == 0.0


def test_an_embedder_is_the_same_bytes_twice(
    tmp_path: Path, cards: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(embedder, "HELD_OUT", 20)
    for name in ("one", "two"):
        embedder.run(
            Namespace(
                out=tmp_path / name / "out",
                base=MODEL,
                steps=2,
                batch=4,
                rate=1e-3,
                enough=2.0,
                seed=1,
                threads=1,
            )
        )
    folders = [tmp_path / name / "out" for name in ("one", "two")]
    first, second = [(folder / "model.safetensors").read_bytes() for folder in folders]
    assert first == second
    assert "2\n" in (folders[0] / "README.md").read_text()
