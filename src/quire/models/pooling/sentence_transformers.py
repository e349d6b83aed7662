"""Reads the files that sentence-transformers writes beside a checkpoint: modules.json and a config for each module.

Knows these files. Does not know torch or architectures. A module that Quire cannot compute is refused: without it the
vectors would be others.

Source: sentence-transformers 6, and the files of its earlier releases (docs: "Creating custom models").
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from quire.config.pooling import Splade, Stage
from quire.errors import ConfigError, Unsupported
from quire.logging import get_logger
from quire.models.json_files import read_json, read_object

log = get_logger(__name__)

MODES = {
    "cls": "CLS",
    "max": "MAX",
    "mean": "MEAN",
    "mean_sqrt_len_tokens": "MEAN_SQRT_LEN",
    "weightedmean": "WEIGHTEDMEAN",
    "lasttoken": "LAST",
}
"""`pooling_mode` -> pooler, in the order in which old files, with a boolean for each, concatenate them."""
OLD_MODES = {mode: f"pooling_mode_{mode}" for mode in ("mean_sqrt_len_tokens", "lasttoken")}
SENTENCE, TOKENS = "sentence_embedding", "token_embeddings"
IGNORED = ("Dropout", "MultiVectorMask")
"""Modules without effect on the vectors; the mask's words are the client's choice."""
MAX_WIDTH = 1 << 20
SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")


class SentenceFiles(Struct, kw_only=True):
    """What the files say. `poolers`: empty if there is no module Pooling: the vectors of tokens are the output."""

    poolers: list[str] = []
    splade: Splade | None = None
    """Its `stages` are not set: the head of the masked language model is in the model's own files."""
    num_in: int = 0  # features that Pooling takes; 0: as the model has them
    include_prompt: bool = True
    stages: list[Stage] = []
    token_stages: list[Stage] = []
    max_length: int = 0
    lowercases: bool = False
    prompts: dict[str, str] = {}
    similarity: str = ""  # unset: the kind of the model decides
    true_false: tuple[int, int | None] | None = None
    """A cross-encoder's tokens of yes and no: its score is the difference of their logits."""
    is_cross_encoder: bool = False
    is_masked: bool = False
    """The model has the head of a masked language model."""


def read_sentence_files(path: str) -> SentenceFiles | None:
    """None: the checkpoint has no modules.json.

    Raises:
        ConfigError: a file is damaged, or modules do not fit together. Unsupported: a module that Quire does not have.
    """
    root = Path(path)
    if (modules := read_json(root / "modules.json")) is None:
        return None
    if not isinstance(modules, list) or not all(isinstance(one, dict) for one in modules):
        raise ConfigError(f"{root / 'modules.json'} is not a list of modules")
    files = SentenceFiles()
    for module in modules:
        _add(files, root, str(module.get("type", "")), _folder(root, module.get("path", "")))
    if (_read_transformer(files, root) == "fill-mask" or files.is_masked) and files.splade is None:
        raise Unsupported(
            f"{root}: logits of a masked language model without a module SpladePooling",
            "serve a checkpoint with this module",
        )
    about = read_object(root / "config_sentence_transformers.json")
    files.is_cross_encoder = about.get("model_type") == "CrossEncoder"
    prompts = about.get("prompts") or {}
    if not isinstance(prompts, dict):
        raise ConfigError(f"{root / 'config_sentence_transformers.json'}: prompts is not an object")
    files.prompts = {str(name): str(text or "") for name, text in prompts.items()}
    files.similarity = str(about.get("similarity_fn_name") or "")
    if files.similarity not in ("", *SIMILARITIES):
        raise ConfigError(
            f"{root / 'config_sentence_transformers.json'}: similarity_fn_name={files.similarity!r:.50}: known are"
            f" {', '.join(SIMILARITIES)}"
        )
    return files


def _folder(root: Path, relative: Any) -> str:
    folder = str(relative or "")
    if ".." in Path(folder).parts or Path(folder).is_absolute():
        raise ConfigError(f"{root / 'modules.json'} refers to {folder!r}, outside its directory")
    return "" if folder == "." else folder


def _add(files: SentenceFiles, root: Path, kind: str, folder: str) -> None:
    """Add one module. The last component of its type is its class, whatever package a release has it in."""
    name, file = kind.rpartition(".")[2], root / folder / "config.json"
    if name in ("Transformer", "MLMTransformer"):
        files.is_masked |= name == "MLMTransformer"
        if folder:
            raise Unsupported(
                f"the module {kind} in the folder {folder!r} of {root}",
                "serve a checkpoint whose model is in its own directory",
            )
        return
    if name in IGNORED:
        return
    if name == "Router":
        for each in _default_route(root, folder):
            _add(files, root, *each)
        return
    config = read_object(file)
    stages = files.token_stages if _on_tokens(config, kind) else files.stages
    if name == "Pooling":
        _add_pooling(files, config, file)
    elif name == "SpladePooling":
        _add_splade(files, config, file)
    elif name == "Dense":
        stages.append(_dense(config, folder, file))
    elif name == "LayerNorm":
        stages.append(_layer_norm(config, folder, file))
    elif name == "Normalize":
        stages.append(Stage(kind="normalize"))
    elif name == "LogitScore":
        _add_logit_score(files, config, file)
    else:
        raise Unsupported(
            f"the module {kind} of {root}",
            "serve a checkpoint with the modules Transformer, Pooling, SpladePooling, Dense, LayerNorm and Normalize",
        )


def _default_route(root: Path, folder: str) -> list[tuple[str, str]]:
    """Types and folders of the modules that a text without a task takes. The others have a model each, and are not served.

    Raises:
        Unsupported: there is no such route. ConfigError: the file is damaged.
    """
    file = root / folder / "router_config.json"
    config = read_object(file)
    types, routes, parameters = (config.get(key) for key in ("types", "structure", "parameters"))
    if not (isinstance(types, dict) and isinstance(routes, dict) and isinstance(parameters, dict)):
        raise ConfigError(f"{file} is not the configuration of a Router")
    name = parameters.get("default_route")
    modules = routes.get(str(name))
    if not isinstance(modules, list):
        raise Unsupported(
            f"{file}: a Router without default_route", "set default_route to a route of it"
        )
    if others := [route for route in routes if route != name]:
        log.warning("%s: requests take the route %s; not served: %s", file, name, ", ".join(others))
    kinds = [str(types.get(one, "")) for one in modules]
    if any(kind.endswith("Router") for kind in kinds):
        raise Unsupported(f"{file}: a Router in a Router", "serve a checkpoint with one")
    return [
        (kind, _folder(root, str(Path(folder, str(one)))))
        for kind, one in zip(kinds, modules, strict=True)
    ]


def _on_tokens(config: Mapping[str, Any], kind: str) -> bool:
    """Whether the module takes the vector of each token. PyLate's modules have no other input."""
    read = str(config.get("module_input_name") or (TOKENS if "pylate" in kind else SENTENCE))
    if str(config.get("module_output_name") or read) != read or read not in (SENTENCE, TOKENS):
        if kind.endswith(".LogitScore"):
            return False
        raise Unsupported(
            f"the module {kind} from {read} to {config.get('module_output_name')}",
            f"serve a checkpoint whose modules change {SENTENCE} or {TOKENS}",
        )
    return read == TOKENS


def _add_pooling(files: SentenceFiles, config: Mapping[str, Any], file: Path) -> None:
    modes = config.get("pooling_mode")
    if modes is None:
        keys = {mode: OLD_MODES.get(mode, f"pooling_mode_{mode}_tokens") for mode in MODES}
        keys["cls"] = "pooling_mode_cls_token"
        modes = [mode for mode in MODES if config.get(keys[mode])] or ["mean"]
    modes = [modes] if isinstance(modes, str) else modes
    if not isinstance(modes, list) or not modes or any(mode not in MODES for mode in modes):
        raise ConfigError(f"{file}: pooling_mode={modes!r}: known are {', '.join(MODES)}")
    _check_first(files, file)
    files.poolers = [MODES[mode] for mode in modes]
    size = config.get("embedding_dimension") or config.get("word_embedding_dimension")
    files.num_in = 0 if size is None else _size(size, "embedding_dimension", file)
    files.include_prompt = config.get("include_prompt") is not False


def _check_first(files: SentenceFiles, file: Path) -> None:
    """Raises Unsupported: another module comes before the one that makes a vector of the tokens' states."""
    if files.poolers or files.splade is not None or files.stages or files.token_stages:
        raise Unsupported(
            f"{file}: a pooling module after others",
            "serve a checkpoint with one, after Transformer",
        )


def _add_splade(files: SentenceFiles, config: Mapping[str, Any], file: Path) -> None:
    _check_first(files, file)
    pooling = config.get("pooling_strategy", "max")
    activation = config.get("activation_function", "relu")
    for key, value, known in (
        ("pooling_strategy", pooling, ("max", "sum")),
        ("activation_function", activation, ("relu", "log1p_relu")),
    ):
        if value not in known:
            raise ConfigError(f"{file}: {key}={value!r}: known are {', '.join(known)}")
    files.splade = Splade(pooling=pooling, twice=activation == "log1p_relu")


def _size(value: Any, key: str, file: Path) -> int:
    if not isinstance(value, int) or not 1 <= value <= MAX_WIDTH:
        raise ConfigError(f"{file}: {key}={value!r} must be a whole number from 1 to {MAX_WIDTH}")
    return value


def _dense(config: Mapping[str, Any], folder: str, file: Path) -> Stage:
    return Stage(
        kind="dense",
        names=["linear", "", "dense"],
        folder=folder or ".",
        num_in=_size(config.get("in_features"), "in_features", file),
        num_out=_size(config.get("out_features"), "out_features", file),
        bias=config.get("bias") is not False,
        activation=activation_name(config.get("activation_function", "torch.nn.Tanh"), str(file)),
        residual=bool(config.get("use_residual")),
    )


def _layer_norm(config: Mapping[str, Any], folder: str, file: Path) -> Stage:
    width = config.get("dimension") or config.get("embedding_dimension")
    size = _size(width, "dimension", file)
    return Stage(kind="layer_norm", names=["norm"], folder=folder, num_in=size, num_out=size, bias=True)  # fmt: skip


def activation_name(name: Any, where: str) -> str:
    """torch.nn.modules.activation.Tanh -> Tanh. Raises Unsupported: it is no class of torch.nn."""
    if name is None:
        return "Identity"
    module, _, own = str(name).rpartition(".")
    if not module.startswith("torch.nn") or not own.isidentifier():
        raise Unsupported(f"{where}: the activation {name!r}", "use a class of torch.nn")
    return own


def _add_logit_score(files: SentenceFiles, config: Mapping[str, Any], file: Path) -> None:
    ids = config.get("true_token_id"), config.get("false_token_id")
    for key, value in zip(("true_token_id", "false_token_id"), ids, strict=True):
        if value is None and key == "false_token_id":
            continue
        if not isinstance(value, int) or not 0 <= value < 1 << 24:
            raise ConfigError(f"{file}: {key}={value!r} is not a token id")
    files.true_false = ids  # type: ignore[assignment]


def _read_transformer(files: SentenceFiles, root: Path) -> str:
    """Reads the longest text, which newer releases write where the tokenizer has it; returns the task of the model."""
    about: dict[str, Any] = {}
    for name in ("sentence_bert_config.json", "sentence_roberta_config.json", "sentence_xlnet_config.json"):  # fmt: skip
        about = about or read_object(root / name)
    length = about.get("max_seq_length")
    if length is None:
        length = read_object(root / "tokenizer_config.json").get("model_max_length")
    if isinstance(length, int | float) and 0 < length < 1 << 30:
        files.max_length = int(length)
    files.lowercases = bool(about.get("do_lower_case"))
    return str(about.get("transformer_task") or "")
