"""A checkpoint in Mistral's format as a checkpoint directory, with config.json and tokenizer.json. Knows file names."""

from __future__ import annotations

from pathlib import Path

from quire.errors import ModelNotFound
from quire.models.converted_folder import converted_folder
from quire.models.mistral.params import read_params
from quire.models.mistral.tekken import TekkenTokenizer

WEIGHTS = "consolidated*.safetensors"
PARAMS, TEKKEN = "params.json", "tekken.json"
TOKENIZERS = ("tokenizer.json", "tokenizer.model")
ALSO = ("*.jinja", "tokenizer*", "generation_config.json", "consolidated.safetensors.index.json")


def is_mistral(folder: Path) -> bool:
    """Whether the directory has weights and params.json, but no config.json."""
    return (folder / PARAMS).is_file() and not (folder / "config.json").is_file()


def mistral_folder(folder: Path) -> str:
    """The directory, made if it is not in the cache.

    Raises:
        ConfigError: a file is damaged. ModelNotFound: there are no weights. Unsupported: as `read_params`.
    """
    weights = sorted(folder.glob(WEIGHTS))
    if not (folder / PARAMS).is_file() or not weights:
        raise ModelNotFound(f"{folder} has no {PARAMS} and {WEIGHTS}: leave --load-format out")
    others = [file for pattern in ALSO for file in folder.glob(pattern)]
    tekken = folder / TEKKEN
    tokenizer = [tekken] if tekken.is_file() and not (folder / "tokenizer.json").is_file() else []

    def texts() -> dict[str, object]:
        found: dict[str, object] = {"config.json": read_params(folder / PARAMS)}
        for file in tokenizer:
            found |= TekkenTokenizer(file).files({other.name for other in others})
        return found

    links = {file.name: file.absolute() for file in (*weights, *others)}
    made_of = [folder / PARAMS, *weights, *tokenizer, *others]
    return converted_folder("mistral", folder.name, made_of, texts, links)


def with_tokenizer_json(folder: str) -> str:
    """The directory of a tokenizer; of one that has only tekken.json (Voxtral's) another, made if it is not in the cache.

    Raises:
        ConfigError: the file is damaged.
    """
    own = Path(folder)
    tekken = own / TEKKEN
    if not tekken.is_file() or any((own / name).is_file() for name in TOKENIZERS):
        return folder
    others = [file for pattern in ALSO[:2] for file in own.glob(pattern)]
    there = {file.name for file in others}
    links = {file.name: file.absolute() for file in others}
    return converted_folder("mistral", f"{own.name}-tokenizer", [tekken, *others], lambda: TekkenTokenizer(tekken).files(there), links)  # fmt: skip
