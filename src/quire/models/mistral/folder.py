"""A checkpoint in Mistral's format as a checkpoint directory, with config.json and tokenizer.json. Knows file names."""

from __future__ import annotations

from pathlib import Path

from quire.errors import ModelNotFound
from quire.models.converted_folder import converted_folder
from quire.models.mistral.params import read_params
from quire.models.mistral.tekken import TekkenTokenizer

WEIGHTS = "consolidated*.safetensors"
PARAMS, TEKKEN = "params.json", "tekken.json"
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
