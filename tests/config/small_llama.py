"""A small Llama's config.json and the facts of a small machine, for the tests of this folder."""

from __future__ import annotations

from quire.platforms.detect import PlatformFacts

GIB = 1 << 30
CPU = PlatformFacts(
    device="cpu",
    name="a test",
    dtypes=("bfloat16", "float32"),
    block_size=64,
    num_batched_tokens=2048,
    max_num_seqs=256,
    depth=1,
    total_bytes=8 * GIB,
    available_bytes=4 * GIB,
)
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "max_position_embeddings": 1024,
    "vocab_size": 100,
    "dtype": "bfloat16",
}
