"""The heads of quire-tiny: chains of proposals computed side by side equal chains computed one at a time; what is published."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.models.checkpoint_locator import EMBEDDED
from tools.tiny_model import evaluate_heads
from tools.tiny_model.evaluate import DRAFTED
from tools.tiny_model.heads import AUX_LAYERS, Documents, Eagle3, Head, Mtp, load, pack
from tools.tiny_model.model import Network, Shape
from tools.tiny_model.train import load_weights, shape_of

MODEL = EMBEDDED / "quire-tiny"
TEXTS = [([3, 9, 4, 7], [5, 6, 8, 2, 11, 12]), ([], [13, 4, 5, 14, 2]), ([7, 7], [9, 1, 2])]
STEPS = 3


@pytest.fixture(scope="module")
def target() -> Network:
    torch.manual_seed(1)
    shape = Shape(
        vocab_size=32, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8
    )  # fmt: skip
    network = Network(shape).requires_grad_(False)
    network.model.embed_tokens.weight.normal_()
    return network


@torch.inference_mode()
def one_chain(head: Head, target: Network, tokens: list[int], begin: int) -> list[Tensor]:
    """Logits of the chain that begins at entry `begin` of a document, entry by entry."""
    documents = pack([([], tokens)], target)
    attention, embedding = head.layer.self_attn, head.table_VD[documents.tokens_BT]
    known: list[tuple[Tensor, Tensor]] = []
    state, found = head.features(documents), []
    own = state
    for entry in range(begin + STEPS):
        taken = state[:, entry : entry + 1] if entry <= begin else own
        if entry + 2 >= len(tokens):
            break
        residual, x = head.entry(embedding[:, entry + 1 : entry + 2], taken)
        known.append(attention.keys_values(x, entry))
        k, v = (torch.cat(each, 2) for each in zip(*known, strict=True))
        whole = torch.ones(1, 1, entry + 1, dtype=torch.bool)
        x = residual + attention(x, entry, (k, v), whole, [])
        own, logits = head.finish(x + head.layer.mlp(head.layer.post_attention_layernorm(x)))
        if entry >= begin:
            found.append(logits[0, 0])
    return found


@pytest.mark.parametrize("kind", [Eagle3, Mtp])
def test_chains_side_by_side_equal_each_alone(kind: type[Head], target: Network) -> None:
    head = Eagle3(target, [2, 4, 5, 6, 9, 12]) if kind is Eagle3 else Mtp(target)
    documents = pack(TEXTS, target)
    with torch.inference_mode():
        steps = list(head.proposals(documents, STEPS))
    mask_BQ, seen = documents.mask_BQ(), 0
    for row, (prompt, answer) in enumerate(TEXTS):
        tokens = prompt + answer
        for place in mask_BQ[row].nonzero().flatten().tolist():
            begin = documents.first - 1 + place - int(documents.begins_B[row])
            alone = one_chain(head, target, tokens, begin)
            assert len(alone) == min(STEPS, len(tokens) - 2 - begin)
            for step, logits in enumerate(alone):
                torch.testing.assert_close(steps[step][row, place], logits, atol=1e-5, rtol=1e-4)
                seen += 1
    assert seen > 15


def test_a_chain_begins_after_each_token_of_an_answer(target: Network) -> None:
    documents = pack(TEXTS, target)
    # the last entry that predicts a token of the answer has its last token but one
    expected = [len(answer) - 1 - (not prompt) for prompt, answer in TEXTS]
    assert documents.mask_BQ().sum(1).tolist() == expected


@pytest.mark.parametrize("folder", [Eagle3.folder, Mtp.folder])
def test_a_published_head_is_as_right_as_its_card_says(folder: str) -> None:
    target = Network(shape_of(MODEL)).requires_grad_(False)
    load_weights(target, MODEL)
    head = load(EMBEDDED / folder, target)
    assert (EMBEDDED / folder / "model.safetensors").stat().st_size < 1e6
    card = Path(EMBEDDED / folder / "README.md").read_text()
    said = re.findall(r"\| ([\d.]+) % \| ([\d.]+) % \| ([\d.]+) % \| (\d\.\d\d) \|$", card, re.M)
    assert len(said) == len(DRAFTED)
    counts = evaluate_heads.Counts()
    counts.add(head, _greedy(target))
    mean = sum(float(first) for first, *_ in said) / len(said) / 100
    assert mean - 0.25 < counts.shares[0] < 1
    assert counts.shares[0] > counts.shares[1] > counts.shares[2] > 0.1


def _greedy(target: Network) -> Documents:
    """A few answers of quire-tiny, token by token."""
    from tokenizers import Tokenizer

    from tools.tiny_model import chat

    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    texts = []
    for asked in ("Tell me a story about a fox.", "What is 34 + 58?"):
        text = chat.render([{"role": "user", "content": asked}], add_generation_prompt=True)
        prompt = tokenizer.encode(text, add_special_tokens=False).ids
        answer: list[int] = []
        while len(answer) < 60 and 2 not in answer:
            tokens = torch.tensor([prompt + answer])
            with torch.inference_mode():
                last = target(tokens, torch.zeros_like(tokens))[:, -1]
                answer.append(int(target.logits(last).argmax()))
        texts.append((prompt, answer))
    return pack(texts, target)


def test_the_aux_layers_are_those_of_the_configuration() -> None:
    import json

    config = json.loads((EMBEDDED / Eagle3.folder / "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == list(AUX_LAYERS)
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
