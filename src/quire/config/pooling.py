"""PoolerConfig: the user's options of pooling. PoolingModel: how hidden states become the outputs of a pooling model.

Knows names, sizes and which of them contradict each other. Does not know checkpoints (`models/pooling.py` reads them), or
tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from quire.errors import ConfigError
from quire.protocol.pooling_info import PoolingInfo

TASKS = ("embed", "classify", "token_embed", "token_classify")
"""In the order in which a server prefers them."""
SEQUENCE_POOLERS = ("CLS", "LAST", "MEAN", "MAX", "MEAN_SQRT_LEN", "WEIGHTEDMEAN")
TOKEN_POOLERS = ("ALL", "STEP")
REPLACED = {
    "normalize": "use use_activation",
    "softmax": "use use_activation",
    "activation": "use use_activation",
    "logit_bias": "use logit_mean",
    "logit_scale": "use logit_sigma, its inverse",
    "max_embed_length": "use max_embed_len",
}
"""Keys of earlier releases of vLLM -> what to use."""


class PoolerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of `pooler_config`; None: as the model has it."""

    task: str | None = None
    pooling_type: str | None = None
    seq_pooling_type: str | None = None
    tok_pooling_type: str | None = None
    use_activation: bool | None = None
    dimensions: int | None = None
    enable_chunked_processing: bool | None = None
    max_embed_len: int | None = None
    logit_mean: float | None = None
    logit_sigma: float | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    enable_flash_late_interaction: bool | None = None


def pooler_options(json_object: Mapping[str, Any]) -> PoolerConfig:
    """Parse `pooler_config`; `pooling_type` becomes one of the two others.

    Raises:
        ConfigError: an unknown key, or an invalid value.
    """
    own = {key: value for key, value in json_object.items() if value is not None}
    keys = PoolerConfig.__struct_fields__
    for key in own:
        if key not in keys:
            remedy = REPLACED.get(key, f"choose from {', '.join(keys)}")
            raise ConfigError(f"pooler_config.{key}: unknown key; {remedy}")
    for key in ("pooling_type", "seq_pooling_type", "tok_pooling_type"):
        if key in own:
            own[key] = str(own[key]).upper()
    if (either := own.pop("pooling_type", None)) is not None:
        key = "tok_pooling_type" if either in TOKEN_POOLERS else "seq_pooling_type"
        if own.setdefault(key, either) != either:
            raise ConfigError(
                f"pooler_config.pooling_type={either} and {key}={own[key]} differ: leave one out"
            )
    for key, names in (
        ("task", TASKS),
        ("seq_pooling_type", SEQUENCE_POOLERS),
        ("tok_pooling_type", TOKEN_POOLERS),
    ):
        if key in own and own[key] not in names:
            raise ConfigError(f"pooler_config.{key}={own[key]!r}: choose from {', '.join(names)}")
    try:
        options = msgspec.convert(own, PoolerConfig)
    except msgspec.ValidationError as why:
        raise ConfigError(f"pooler_config: {why}") from None
    _check_numbers(options)
    return options


def _check_numbers(options: PoolerConfig) -> None:
    for key in ("dimensions", "max_embed_len"):
        if (value := getattr(options, key)) is not None and value < 1:
            raise ConfigError(f"pooler_config.{key}={value}: must be at least 1")
    if options.logit_sigma == 0:
        raise ConfigError(
            "pooler_config.logit_sigma=0: logits are divided by it; use another number"
        )
    if min([options.step_tag_id or 0, *(options.returned_token_ids or ())]) < 0:
        raise ConfigError("pooler_config.step_tag_id, returned_token_ids: a token id is at least 0")


class Stage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One step from a pooled vector to the output, with weights of its own or none.

    `kind`: dense, normalize, layer_norm, or activation alone. `names`: of the module in the checkpoint; the first that
    is there counts. `folder`: of its weights, below the checkpoint, or a file there; "": the model's own files.
    """

    kind: str
    names: list[str] = []
    folder: str = ""
    num_in: int = 0
    num_out: int = 0
    bias: bool = False
    """Whether there must be a bias; one that is there is always used."""
    is_tied: bool = False
    """Whether the weight is the table of the embeddings where the checkpoint has none."""
    activation: str = ""
    """A class of torch.nn; "": none."""
    residual: bool = False
    eps: float = 1e-5


class Splade(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Weights of the vocabulary's tokens as a vector: of each token of the text log(1 + relu(logits)), then the largest or the sum.

    `stages`: from hidden states to logits. `pooling`: max or sum. `twice`: the logarithm is taken twice.
    Source: SPLADE v2 (arXiv 2109.10086); twice: arXiv 2504.14839.
    """

    stages: list[Stage] = []
    pooling: str = "max"
    twice: bool = False


class PoolingModel(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the worker computes for each task, and what the frontend knows of it.

    `architecture`: as config.json names it. `poolers`: of sequences, concatenated. `stages`: after them, for vectors.
    `token_stages`: the same for the vector of each token. `head`, `token_head`: for classes. `from_tokens`: the head is
    made from the LM head's rows of these tokens; `difference`: one label, the last row minus the first.
    `splade`: vectors are made by it, in place of `poolers`. `edges`: ids of a first and a last token that count in no output
    of tokens (BGE-M3). `max_length`: in tokens; 0: the model's. `pinned`: the cut of all vectors; 0: none.
    """

    info: PoolingInfo
    architecture: str
    hidden_size: int
    poolers: list[str]
    token_pooler: str = "ALL"
    causal: bool = True
    has_token_types: bool = False
    stages: list[Stage] = []
    token_stages: list[Stage] = []
    head: list[Stage] = []
    token_head: list[Stage] = []
    splade: Splade | None = None
    edges: list[int] = []
    from_tokens: list[int] = []
    difference: bool = False
    activation: str = ""
    normalizes_tokens: bool = True
    use_activation: bool | None = None
    logit_mean: float | None = None
    logit_sigma: float | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    pinned: int = 0
    max_length: int = 0
    float32_head: bool = True
