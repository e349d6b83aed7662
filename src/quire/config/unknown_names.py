"""The error for a name that no table has: suggests the nearest known one, or Quire's flag for one of llama.cpp."""

from __future__ import annotations

import difflib
from typing import Literal

from quire.config.options import options
from quire.config.vllm_flags import OLD

Source = Literal["flag", "keyword"]

_LLAMA_CPP = """
--max-model-len: ctx-size c n_ctx
QUIRE_CPU_OMP_THREADS_BIND=0-7 (cores to compute on; unset: the cores of one NUMA node): threads t threads-batch tb n_threads cpu-mask cpu-range
the model as the first word (a directory or a hub id, not a GGUF file): m model-url mu hf hfr hf-repo hff hf-file model_path
leave it out (the whole model is on the device; --cpu-offload-gb keeps a part of it in host memory): ngl gpu-layers n-gpu-layers n_gpu_layers
--max-num-seqs: np parallel
--max-num-batched-tokens: b batch-size ub n_batch
--attention-backend, or leave it out (the platform's first is used): fa flash-attn flash_attn
--kv-cache-dtype int8 or fp8: ctk cache-type-k ctv cache-type-v
--served-model-name: a alias
--seed: s
max_tokens in each request, or --override-generation-config '{"max_new_tokens": 256}': n-predict predict
temperature, top_p and the like in each request, or --override-generation-config '{"temperature": 0.7}': temp top-k top-p min-p repeat-penalty presence-penalty frequency-penalty samplers
response_format or structured_outputs in each request: grammar grammar-file j json-schema
--enable-lora (which is not supported yet), or a checkpoint with the adapter merged into it: lora lora-scaled
--speculative-config (which is not supported yet): md model-draft draft draft-max draft-min hfd
--tensor-parallel-size (one device is supported): sm split-mode ts tensor-split mg main-gpu
--runner pooling (which is not supported yet): embedding embeddings reranking rerank
--reasoning-parser: reasoning-format reasoning-budget
--chat-template FILE: chat-template-file
--ssl-keyfile and --ssl-certfile: ssl-key-file ssl-cert-file
--root-path: api-prefix
--disable-ui: webui ui
--receive-timeout and --send-timeout: to timeout
--log-level DEBUG: v verbose verbosity lv
--hf-overrides '{"rope_parameters": {...}}': rope-freq-base rope-freq-scale rope-scale yarn-orig-ctx yarn-ext-factor
leave it out (Quire has no such choice): jinja mmap cont-batching cb warmup metrics slots props cache-prompt kv-unified context-shift mlock numa
"""
LLAMA_CPP = {
    name: remedy
    for remedy, _, names in (line.rpartition(": ") for line in _LLAMA_CPP.strip().splitlines())
    for name in names.split()
}
"""Flag of llama.cpp without its dashes, or keyword of llama-cpp-python -> what to use."""


class UnknownName(TypeError):
    """A keyword or flag that no table has; the message suggests what to use."""


def unknown(written: str, source: Source) -> str:
    """The error message for an unknown name."""
    what = "flag" if source == "flag" else "keyword"
    bare = written.lstrip("-")
    if (remedy := LLAMA_CPP.get(bare) or LLAMA_CPP.get(bare.removeprefix("no-"))) is not None:
        shown = written if written.startswith("-") else spelt(bare, source)
        use = "" if remedy.startswith("leave") else "use "
        return f"unknown {what} {shown}, a name of llama.cpp: {use}{remedy}"
    name = bare.replace("-", "_")
    near = difflib.get_close_matches(name.removeprefix("no_"), [*options(), *OLD], n=1, cutoff=0.6)
    hint = f"; did you mean {spelt(near[0], source)}?" if near else ""
    one_dash = source == "flag" and written.startswith("-") and not written.startswith("--")
    return f"unknown {what} {written if one_dash else spelt(name, source)}{hint}"


def spelt(name: str, source: Source) -> str:
    """max_num_seqs -> --max-num-seqs on a command line"""
    return f"--{name.replace('_', '-')}" if source == "flag" else name
