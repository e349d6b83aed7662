"""What a checkpoint offers as a pooling model: tasks, poolers, heads and labels. Imports no torch.

Knows names of architectures (`families.toml`), config.json and the files of sentence-transformers. Does not know weights.
The user's pooler_config counts first, then these files, then the family's own way.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from quire.config.engine import EngineConfig
from quire.config.pooling import TASKS, PoolerConfig, PoolingModel, Splade, Stage, pooler_options
from quire.errors import ConfigError, Unsupported
from quire.models.checkpoint_files import HEAD_FILES
from quire.models.json_files import token_ids
from quire.models.pooling.sentence_transformers import (
    SentenceFiles,
    activation_name,
    read_sentence_files,
)
from quire.models.pooling.stages import head_stages, token_vectors, with_logits, without_normalize
from quire.models.registry import FAMILIES, MODELS
from quire.protocol.pooling_info import PoolingInfo

TABLE: dict[str, Any] = FAMILIES["pooling"]
ENDS: dict[str, str] = TABLE["ends"]
"""End of an architecture's name -> what the checkpoint is for. The first that fits counts."""
HEADS: dict[str, dict[str, Any]] = TABLE["heads"]
"""What it is for -> its heads and tasks."""
SAME: dict[str, str] = TABLE["same"]
"""Architecture -> the architecture in `registry.MODELS` with the same layers."""
MAX_LABELS = 1 << 16
GENERATE, EMBED, CLASSIFY, SPLADE, M3 = "generate", "embed", "classify", "splade", "bge_m3"


def purpose(architecture: str) -> str:
    """generate, embed, classify, or a key of HEADS: what a checkpoint of this architecture is for."""
    return next((use for end, use in ENDS.items() if architecture.endswith(end)), GENERATE)


def base_architecture(architecture: str, known: Mapping[str, str] = MODELS) -> str:
    """The architecture in the registry with the same layers; the name itself if there is none."""
    if architecture in known:
        return architecture
    if (same := SAME.get(architecture)) is not None:
        return same
    end = next((end for end in ENDS if architecture.endswith(end)), "")
    stem = architecture.removesuffix(end)
    named = (f"{stem}ForCausalLM", f"{stem}Model")
    return next((name for name in named if name in known), architecture)


def read_pooling(
    config: EngineConfig, path: str, hf_config: Mapping[str, Any], tokenizer: str | None = None
) -> PoolingModel | None:
    """None: the model generates.

    Raises:
        ConfigError: settings contradict each other, or a file is damaged. Unsupported: a module that Quire does not have.
    """
    options = config.model
    names = hf_config.get("architectures") or [""]
    architecture, use = str(names[0]), purpose(str(names[0]))
    if "AutoModelForCausalLM" in (hf_config.get("auto_map") or {}) and architecture not in MODELS:
        use = GENERATE  # whatever its name says
    files = None
    if options.runner != GENERATE:
        files = read_sentence_files(path)
    if options.runner == GENERATE or (
        options.runner == "auto" and options.convert in ("auto", "none")
        and use == GENERATE and files is None
    ):  # fmt: skip
        if options.convert in (EMBED, CLASSIFY):
            raise ConfigError(
                f"convert={options.convert}: runner=generate generates; use runner=pooling"
            )
        if options.pooler_config:
            raise ConfigError("pooler_config: this model generates; use runner=pooling")
        return None
    return _Reader(config, path, hf_config, architecture, use, files, tokenizer).model()


class _Reader:
    """Puts a PoolingModel together; `files`: sentence-transformers' files."""

    def __init__(
        self, config: EngineConfig, path: str, hf_config: Mapping[str, Any], architecture: str, use: str,
        files: SentenceFiles | None, tokenizer: str | None,
    ):  # fmt: skip
        self.path, self.hf, self.architecture = path, hf_config, architecture
        self.files, self.tokenizer = files or SentenceFiles(), tokenizer or path
        self.has_files = files is not None
        self.options: PoolerConfig = pooler_options(config.model.pooler_config)
        self.family: dict[str, Any] = TABLE["models"].get(base_architecture(architecture), {})
        self.hidden = int(
            hf_config.get("hidden_size") or hf_config.get("dim") or hf_config.get("n_embd") or 0
        )
        self.use = self._chosen_use(config.model.convert, use)
        if self.use == EMBED and use == GENERATE and (rows := self.options.returned_token_ids):
            # A process reward model that generates: the logits of these tokens are its scores.
            self.hf = {**hf_config, "classifier_from_token": rows, "method": "no_post_processing"}
            self.options = replace(self.options, returned_token_ids=None)
            self.use = "token_classify"

    def _chosen_use(self, convert: str, use: str) -> str:
        """The kind of output; `convert` counts first."""
        if convert in (EMBED, CLASSIFY):
            return convert
        if self.files.true_false is not None or self.hf.get("classifier_from_token"):
            return CLASSIFY
        if use == GENERATE and convert == "none":
            raise ConfigError(
                f"convert=none: {self.architecture} generates; use convert=embed or classify, or runner=generate"
            )
        use = EMBED if use == GENERATE else use
        if use == EMBED and (self.files.splade or "SpladeSparse" in self.architecture):
            return SPLADE
        files = all((Path(self.path) / name).is_file() for name in HEAD_FILES)
        return M3 if use == EMBED and (files or self.architecture.startswith("BgeM3")) else use

    def model(self) -> PoolingModel:
        if not self.hidden:
            raise ConfigError(f"{self.path}/config.json has no hidden_size")
        heads, chosen = HEADS[self.use], self.options
        self.num_labels = self._num_labels(heads)
        own = [chosen.seq_pooling_type] if chosen.seq_pooling_type else None
        poolers = own or self.files.poolers or self._default_poolers()
        splade, pooled = None, len(poolers) * self.hidden
        if self.use == SPLADE:
            found = self.files.splade or Splade()
            splade = with_logits(found, self.architecture, self.hf, self.family, self.hidden)
            pooled = splade.stages[-1].num_out
        stages, normalizes = without_normalize(self.files.stages)
        if not self.has_files:
            normalizes = splade is None
        token_stages, normalizes_tokens = without_normalize(self.files.token_stages)
        if not self.files.token_stages:
            name = self._token_projection(heads)
            token_stages = [token_vectors(self.path, self.hf, self.hidden, name)] if name else []
            normalizes_tokens = True
        tasks = self._tasks(heads)
        activation = str(heads.get("activation") or self._activation())
        step, returned = self._step(heads)
        vectors = any(task.endswith("embed") for task in tasks)
        self._check_widths(stages, token_stages, pooled)
        causal = self._causal()
        ends = poolers == ["LAST"]
        return PoolingModel(
            info=self._info(
                tasks, stages, token_stages, pooled, normalizes, activation, ends and causal
            ),
            architecture=self.architecture,
            hidden_size=self.hidden,
            poolers=poolers,
            token_pooler=chosen.tok_pooling_type or ("STEP" if step is not None else "ALL"),
            causal=causal,
            has_token_types=bool(self.family.get("token_types"))
            and self.hf.get("type_vocab_size") != 1,
            stages=stages if vectors else [],
            token_stages=token_stages if vectors else [],
            head=self._head("head", heads) if "classify" in tasks else [],
            token_head=self._head("head" if self.use == CLASSIFY else "token_head", heads)
            if "token_classify" in tasks
            else [],
            splade=splade,
            edges=self._edges(),
            from_tokens=self.token_ids,
            difference=self._is_difference(),
            activation=activation,
            normalizes_tokens=normalizes_tokens,
            use_activation=chosen.use_activation,
            logit_mean=chosen.logit_mean,
            logit_sigma=chosen.logit_sigma,
            step_tag_id=step,
            returned_token_ids=returned,
            pinned=self._pinned(stages),
            max_length=self.files.max_length,
            float32_head=self.hf.get("head_dtype") != "model",
        )

    def _default_poolers(self) -> list[str]:
        chosen = {"avg": "MEAN", "cls": "CLS", "last": "LAST"}.get(str(self.hf.get("pooling")))
        if (mode := self.hf.get("classifier_pooling")) is not None and self.use == CLASSIFY:
            chosen = {"cls": "CLS", "mean": "MEAN"}.get(str(mode))
        return [chosen or self.family.get("pooler", "LAST")]

    def _token_projection(self, heads: Mapping[str, Any]) -> str:
        """The name of the layer that makes the vector of each token; "": there is none."""
        own = "linear" if self.architecture.endswith("ColBERT") else ""
        return str(heads.get("token_vectors", own))

    def _edges(self) -> list[int]:
        keys = ("bos_token_id", "eos_token_id")
        return [int(self.hf.get(key) or 0) for key in keys] if self.use == M3 else []

    def _tasks(self, heads: Mapping[str, Any]) -> list[str]:
        tasks: list[str] = list(heads["tasks"])
        own_vectors = self.architecture.endswith("ColBERT")
        if self.use == EMBED and (own_vectors or (self.has_files and not self.files.poolers)):
            tasks = ["token_embed"]
        if (first := self.options.task) is not None:
            if first not in tasks:
                raise ConfigError(
                    f"pooler_config.task={first}: {self.architecture} offers {', '.join(tasks)}; choose one of these, or"
                    " another convert"
                )
            tasks = [first, *(task for task in tasks if task != first)]
        else:
            tasks.sort(key=TASKS.index)
        return tasks

    def _num_labels(self, heads: Mapping[str, Any]) -> int:
        if self.hf.get("classifier_from_token") or self.files.true_false:
            return 1 if self._is_difference() else len(self.token_ids)
        labels = self.hf.get("id2label")
        count = heads.get("labels") or self.hf.get("num_labels")
        if count is None:
            count = len(labels) if isinstance(labels, dict) else 2
        if not isinstance(count, int) or not 1 <= count <= MAX_LABELS:
            raise ConfigError(f"num_labels={count!r} in config.json: must be 1 to {MAX_LABELS}")
        return count

    def _activation(self) -> str:
        """identity, softmax, sigmoid, or a class of torch.nn: by the config's words, else by the number of labels."""
        kinds = {
            "regression": "identity",
            "single_label_classification": "softmax",
            "multi_label_classification": "sigmoid",
        }
        if (kind := self.hf.get("problem_type")) in kinds:
            return kinds[str(kind)]
        own = self.hf.get("sentence_transformers")
        name = own.get("activation_fn") if isinstance(own, dict) else None
        name = name or self.hf.get("sbert_ce_default_activation_function")
        if name is None:
            return "sigmoid" if self.num_labels < 2 else "softmax"
        return activation_name(name, f"{self.path}/config.json")

    def _step(self, heads: Mapping[str, Any]) -> tuple[int | None, list[int] | None]:
        chosen = self.options
        step = chosen.step_tag_id
        if step is None and "step_tag" in heads and chosen.tok_pooling_type != "ALL":
            step = int(heads["step_tag"])
        if chosen.tok_pooling_type == "STEP" and step is None and chosen.returned_token_ids is None:
            raise ConfigError("pooler_config.tok_pooling_type=STEP needs step_tag_id")
        return step, chosen.returned_token_ids

    def _causal(self) -> bool:
        """Whether no token attends to later ones."""
        if self.hf.get("is_causal") is False or "Bidirectional" in self.architecture:
            return False
        if self.hf.get("use_bidirectional_attention") in (True, "all"):
            return False
        return bool(self.family.get("causal", True))

    def _head(self, key: str, heads: Mapping[str, Any]) -> list[Stage]:
        if self.token_ids:
            return []
        text = str(heads.get(key) or self.family.get(key) or heads.get("own", "score|classifier"))
        special = heads.get("by_architecture", {}).get(self.architecture)
        return head_stages(str(special or text), self.hf, self.hidden, self.num_labels)

    # -- classes from tokens
    def _is_difference(self) -> bool:
        two = len(self.token_ids) == 2
        if self.files.true_false is not None:
            return two
        return two and self.hf.get("method") != "no_post_processing"

    @cached_property
    def token_ids(self) -> list[int]:
        """Tokens whose rows of the LM head are the classifier: no, yes."""
        if self.files.true_false is not None:
            yes, no = self.files.true_false
            return [yes] if no is None else [no, yes]
        names = self.hf.get("classifier_from_token") or []
        if not isinstance(names, list):
            raise ConfigError(f"classifier_from_token={names!r}: must be a list of tokens")
        file = Path(self.tokenizer, "tokenizer.json")
        named = file.is_file() and not all(isinstance(name, int) for name in names)
        words = token_ids(file) if named else {}
        found = [name if isinstance(name, int) else words.get(str(name)) for name in names]
        if None in found:
            raise ConfigError(
                f"classifier_from_token={names!r}: {names[found.index(None)]!r} is no token of {file};"
                " name tokens, or give their ids"
            )
        return [int(one) for one in found if one is not None]

    # -- vectors
    def _check_widths(self, stages: list[Stage], token_stages: list[Stage], pooled: int) -> None:
        """Raises ConfigError: one stage's output does not fit the next."""
        if self.files.num_in not in (0, self.hidden) and not token_stages:
            raise ConfigError(
                f"the module Pooling of {self.path} takes {self.files.num_in} features, the model gives {self.hidden}"
            )
        for chain, width in ((token_stages, self.hidden), (stages, pooled)):
            for stage in chain:
                if stage.num_in not in (0, width):
                    raise ConfigError(
                        f"the module in {stage.folder} of {self.path} takes {stage.num_in} features, and gets {width}"
                    )
                width = stage.num_out or width

    @staticmethod
    def _width(stages: list[Stage], width: int) -> int:
        return next((stage.num_out for stage in reversed(stages) if stage.num_out), width)

    def _matryoshka(self) -> list[int] | None:
        lengths = self.hf.get("matryoshka_dimensions")
        if isinstance(lengths, list) and lengths:
            return [int(length) for length in lengths]
        return [] if self.hf.get("is_matryoshka") else None

    def _pinned(self, stages: list[Stage]) -> int:
        if (pinned := self.options.dimensions) is None:
            return 0
        if (allowed := self._matryoshka()) is None or (allowed and pinned not in allowed):
            raise ConfigError(
                f"pooler_config.dimensions={pinned}: the vectors of this model can be cut to"
                f" {', '.join(map(str, allowed)) if allowed else 'no other length'}; hf_overrides={{'is_matryoshka': true}}"
                " allows any"
            )
        return pinned

    def _info(
        self, tasks: list[str], stages: list[Stage], token_stages: list[Stage], pooled: int,
        normalizes: bool, activation: str, cached: bool,
    ) -> PoolingInfo:  # fmt: skip
        files, chosen = self.files, self.options
        width = self._width(token_stages, self.hidden)
        if "embed" in tasks:
            width = self._width(stages, pooled)
        scores = any("classify" in task for task in tasks)
        vectors = any("embed" in task for task in tasks)
        names = self.hf.get("id2label")
        names = names if isinstance(names, dict) else {}
        labels = [str(names.get(str(i), names.get(i, f"LABEL_{i}"))) for i in range(self.num_labels)]  # fmt: skip
        instructions = self.hf.get("task_instructions")
        choose = chosen.use_activation
        pinned = self._pinned(stages)
        return PoolingInfo(
            tasks=tasks,
            num_dimensions=(pinned or width) if vectors else 0,
            matryoshka=self._matryoshka() if vectors else None,
            normalizes=normalizes if choose is None else choose,
            labels=labels if scores else [],
            num_labels=self.num_labels if scores else 0,
            use_sep_token=self._use_sep_token(),
            prompts=files.prompts,
            chunked=bool(chosen.enable_chunked_processing),
            max_embed_len=chosen.max_embed_len or 0,
            cached_tasks=[task for task in tasks if cached and not task.startswith("token_")],
            default_activation=activation != "identity" if choose is None else choose,
            include_prompt=files.include_prompt,
            task_instructions=dict(instructions) if isinstance(instructions, dict) else {},
            similarity=files.similarity or ("dot" if self.use == SPLADE else "cosine"),
            do_lower_case=files.lowercases,
            architecture=self.architecture,
        )

    def _use_sep_token(self) -> bool:
        if (own := self.hf.get("use_sep_token")) is not None:
            return bool(own)
        return not self.token_ids


def adapted(hf_config: Mapping[str, Any], pooling: PoolingModel | None) -> dict[str, Any]:
    """config.json for a decoder whose tokens attend to later ones: its layers read `is_causal`.

    Gemma's windows then reach half as far to each side (Transformers, `Gemma3TextConfig`).
    """
    found = dict(hf_config)
    if pooling is None or pooling.causal:
        return found
    if found.pop("use_bidirectional_attention", None) and found.get("sliding_window"):
        found["sliding_window"] = found["sliding_window"] // 2 + 1
    return {**found, "is_causal": False}


def check_pooling(model: PoolingModel, base: str) -> None:
    """Raises Unsupported: no native model has these layers, and Transformers has none with an LM head."""
    if base not in MODELS and not base.endswith("ForCausalLM"):
        raise Unsupported(
            f"{model.architecture} as a pooling model (no native model has its layers)",
            "serve a checkpoint of another architecture; docs/models.md lists those that run",
        )
