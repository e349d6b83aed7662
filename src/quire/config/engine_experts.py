"""Experts that the engines of data parallelism share: whether they do, and what cannot be served then.

Knows options and the sizes of config.json. Does not know where an expert is (`parallel/expert_placement.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.config.model_sizes import model_size
from quire.config.parallel.parallel_config import ParallelConfig
from quire.errors import Unsupported

if TYPE_CHECKING:
    from quire.config.engine import Resolved

REMEDY = "leave --enable-expert-parallel out: then each engine has all experts"


def engines_share_experts(config: ParallelConfig) -> bool:
    """Whether each engine has a part of the experts, if the model has experts."""
    return config.enable_expert_parallel and config.data_parallel_size > 1


def check_engine_experts(resolved: Resolved) -> None:
    """Raises Unsupported: engines cannot share the experts of this model, or not with this option."""
    config, parallel = resolved.config, resolved.config.parallel
    if not engines_share_experts(parallel) or not model_size(resolved.hf_config, "num_experts"):
        return
    here = len(parallel.local_ranks) == parallel.data_parallel_size
    balanced_here = not (parallel.is_external or parallel.is_hybrid)
    one_machine = parallel.nnodes == 1 and parallel.data_parallel_backend == "mp"
    refused = {
        "engines on several machines, or behind another load balancer": not (here and balanced_here and one_machine),
        "--data-parallel-multi-port-external-lb": parallel.data_parallel_multi_port_external_lb,
        "--pipeline-parallel-size": parallel.pipeline_parallel_size > 1,
        "--prefill-context-parallel-size": parallel.prefill_context_parallel_size > 1,
        "--enable-eplb": parallel.enable_eplb,
        "--enable-lora": config.lora.enable_lora,
        "--model-impl transformers": config.model.model_impl == "transformers",
        f"device {resolved.device}": resolved.device != "cpu",
    }  # fmt: skip
    for what, is_given in refused.items():
        if is_given:
            size = parallel.data_parallel_size
            about = f"enable_expert_parallel and data_parallel_size={size} with {what}"
            raise Unsupported(about, REMEDY)
