"""Chooses the mode of a Transformers model: paged, or one cache per request.

    paged         one forward pass computes all requests of a step side by side; keys and values go through Quire's
                  attention layers into its KV cache, so prefix caching and preemption work as for native models.
    per request   one forward pass per request, with a cache of Transformers; correct for recurrent layers,
                  alibi and sparse attention, but without paging and without prefix caching.

Knows a config as a dict. Does not know torch or the model. What only the model can show (does each layer go
through the attention interface, with which mask?) is found at build time by `paged.py` and `self_check.py`,
which may change "paged" to "per request", never the reverse.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from quire.errors import Unsupported

Mode = Literal["paged", "per request"]
PAGED: Mode = "paged"
PER_REQUEST: Mode = "per request"

LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""Layers that mix tokens only through attention; any other layer would mix tokens of different requests."""

_OWN_ATTENTION = "its attention does not go through the attention interface of Transformers"
_RECURRENT = "it has recurrent layers, which would see the tokens of other requests"
_SPARSE = "it selects keys by its own index"
_TWICE = "it calls attention more than once per layer"
_OWN_MASK = "it builds its own attention mask"

PER_REQUEST_TYPES: dict[str, str] = {
    **dict.fromkeys(("bloom", "falcon", "mpt", "xglm"), _OWN_ATTENTION),
    **dict.fromkeys(("falcon_mamba", "mamba", "mamba2", "xlstm"), _RECURRENT),
    **dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid", "jamba", "nemotron_h"), _RECURRENT),
    **dict.fromkeys(("zamba", "zamba2", "minimax", "olmo_hybrid"), _RECURRENT),
    **dict.fromkeys(("lfm2", "lfm2_moe", "kimi_linear", "qwen3_next"), _RECURRENT),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "bailing_hybrid"), _RECURRENT),
    **dict.fromkeys(("deepseek_v32", "deepseek_v4", "glm_moe_dsa"), _SPARSE),
    "diffllama": _TWICE,
    "doge": _OWN_MASK,
}
"""model_type -> why, for models whose config does not show it in `layer_types`."""

UNSUPPORTED_TYPES: dict[str, str] = {
    "recurrent_gemma": "it keeps its state outside the cache classes of Transformers",
    "rwkv": "it keeps its state outside the cache classes of Transformers",
    "reformer": "it keeps its state outside the cache classes of Transformers",
    "xlnet": "it is not a causal model",
    "xlm": "it is not a causal model",
    "blt": "it reads bytes through its own encoder",
}
"""model_type -> why it cannot run at all; these fail before weights are read."""

ENCODER_DECODERS = frozenset(
    "bart bigbird_pegasus blenderbot blenderbot-small encoder-decoder fsmt led longt5 m2m_100 marian mbart moonshine mt5"
    " mvp nllb-moe pegasus pegasus_x plbart prophetnet seamless_m4t seamless_m4t_v2 speech-encoder-decoder"
    " speech_to_text switch_transformers t5 t5gemma t5gemma2 udop umt5 vision-encoder-decoder whisper".split()
)
"""model_type of encoder-decoders; some of these families also have a decoder-only ...ForCausalLM."""


def check_supported(hf_config: Mapping[str, Any], architecture: str) -> None:
    """Refuse early what neither mode can run.

    Raises:
        Unsupported: an encoder-decoder, or a model type in `UNSUPPORTED_TYPES`.
    """
    kind = str(hf_config.get("model_type", ""))
    reason = UNSUPPORTED_TYPES.get(kind)
    decoder_only = architecture.endswith("ForCausalLM")
    if hf_config.get("is_encoder_decoder", kind in ENCODER_DECODERS and not decoder_only):
        reason = "it is an encoder-decoder"
    if reason:
        raise Unsupported(
            f"{architecture} ({kind}) through the Transformers backend ({reason})",
            "use a decoder-only checkpoint",
        )


def check_weights(quantized: bool, architecture: str) -> None:
    """Raises Unsupported: the backend cannot multiply quantized weights."""
    if quantized:
        raise Unsupported(
            f"quantized weights of {architecture}, which runs through Transformers",
            "serve its float16 or bfloat16 form without --quantization",
        )


def check_own_cache(dtype: str, kv_dtype: str, architecture: str) -> None:
    """For per-request mode. Raises Unsupported: Transformers' caches do not convert keys and values."""
    if kv_dtype != dtype:
        raise Unsupported(
            f"kv_cache_dtype={kv_dtype} for {architecture}, which keeps its cache itself",
            "leave kv_cache_dtype=auto",
        )


def choose_mode(
    hf_config: Mapping[str, Any], max_model_len: int | None = None, step_tokens: int = 0
) -> tuple[Mode, str]:
    """Choose by the config alone: the mode, and one clause that says why.

    Args:
        hf_config: config.json of the text model, as a dict.
        max_model_len: the longest request, in tokens; None: the config's own limit.
        step_tokens: the most tokens of one step (max_num_batched_tokens).
    """
    kind = str(hf_config.get("model_type", ""))
    if reason := PER_REQUEST_TYPES.get(kind):
        return PER_REQUEST, reason
    if others := sorted({str(t) for t in hf_config.get("layer_types") or ()} - LAYER_TYPES):
        return PER_REQUEST, f"it has layers of type {', '.join(others)}"
    if hf_config.get("alibi"):
        return PER_REQUEST, "it adds a position bias to attention (alibi)"
    longest = max_model_len or int(hf_config.get("max_position_embeddings") or 0)
    chunk = _chunk(hf_config)
    if chunk and longest > chunk:
        return PER_REQUEST, (
            f"it attends within chunks of {chunk} tokens and max_model_len is {longest} "
            f"(--max-model-len {chunk} makes it paged)"
        )
    if (tuning := _tuning(hf_config)) and max(longest, step_tokens) > tuning:
        return (
            PER_REQUEST,
            f"it scales queries by their position in the pass beyond {tuning} tokens",
        )
    return PAGED, "every layer is attention, full or in a window"


def _chunk(hf_config: Mapping[str, Any]) -> int:
    """Tokens per chunk, 0 if no layer uses chunked attention (Llama 4)."""
    types = hf_config.get("layer_types")
    if types is not None and "chunked_attention" not in types:
        return 0
    return int(hf_config.get("attention_chunk_size") or 0)


def _tuning(hf_config: Mapping[str, Any]) -> int:
    """From this token on, the index in the pass, not the position, scales queries (Llama 4); 0: never."""
    if not hf_config.get("attn_temperature_tuning"):
        return 0
    return max(1, int(hf_config.get("floor_scale") or 0) - 1)
