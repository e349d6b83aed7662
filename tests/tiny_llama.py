"""A tiny random Llama with a byte-level tokenizer and a chat template, written without torch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD, INNER, LENGTH = 32, 2, 4, 2, 8, 48, 256
SPECIAL = ("<|pad|>", "<|bos|>", "<|eos|>")
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def make_tokenizer(folder: Path) -> int:
    """Writes tokenizer.json; one token a byte. Returns how many tokens there are."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: at for at, token in enumerate((*SPECIAL, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings | {"chat_template": TEMPLATE})
    )
    return len(vocabulary)


def make_checkpoint(
    folder: Path, length: int = LENGTH, kv_heads: int = KV_HEADS, head: int = HEAD
) -> str:
    """The path of a model that serves; `length`: tokens of a prompt and its answer."""
    vocabulary = make_tokenizer(folder)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "max_position_embeddings": length,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    draw = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (draw.standard_normal((rows, columns)) * 0.3).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": matrix(vocabulary, HIDDEN),
        "model.norm.weight": np.ones(HIDDEN, np.float32),
        "lm_head.weight": matrix(vocabulary, HIDDEN),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        weights |= {
            f"{at}.input_layernorm.weight": np.ones(HIDDEN, np.float32),
            f"{at}.post_attention_layernorm.weight": np.ones(HIDDEN, np.float32),
            f"{at}.self_attn.q_proj.weight": matrix(HEADS * head, HIDDEN),
            f"{at}.self_attn.k_proj.weight": matrix(kv_heads * head, HIDDEN),
            f"{at}.self_attn.v_proj.weight": matrix(kv_heads * head, HIDDEN),
            f"{at}.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * head),
            f"{at}.mlp.gate_proj.weight": matrix(INNER, HIDDEN),
            f"{at}.mlp.up_proj.weight": matrix(INNER, HIDDEN),
            f"{at}.mlp.down_proj.weight": matrix(HIDDEN, INNER),
        }
    save_file(weights, str(folder / "model.safetensors"))
    return str(folder)
