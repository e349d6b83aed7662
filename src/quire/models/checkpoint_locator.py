"""Finds a checkpoint: a directory, an embedded model, or a hub id, whose weights are downloaded last.

Knows paths, the hub's client, and names that are no checkpoint for Quire. Does not know what the files contain. A name may be any
text, so it is looked up with os.path: pathlib raises an error for a text that cannot be a path.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from quire.config.load import LoadConfig
from quire.config.model import ModelConfig
from quire.errors import ConfigError, ModelNotFound, QuireError, Unsupported
from quire.models.checkpoint_files import HEAD_FILES
from quire.models.gguf.folder import checkpoint_folder, is_gguf, only_model
from quire.models.gguf.hub import choose, gguf_name, projector_of
from quire.models.gguf.projector import LINK
from quire.models.mistral.folder import is_mistral, mistral_folder, with_tokenizer_json

EMBEDDED = Path(__file__).parents[1] / "embedded"
WANTED_FILES = ("*.json", "artifact.metadata", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.py")
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth")
NO_TOKENIZER_FILES = [*WEIGHT_FILES, "*.gguf", "*.npz"]
VOCABULARIES = ("tokenizer.json", "*.model", "*.model.v*", "vocab.*", "*.tiktoken", "tekken.json", "*.spm", "*.bpe", "tokenization*.py")  # fmt: skip
"""Files with the tokens of a tokenizer, or with code that makes them."""

OBJECT_STORES = ("s3://", "gs://", "az://")

LOCAL = "pass a directory with config.json and weights"
LOCAL_TOKENIZER = "pass a directory with tokenizer.json"
ADAPTER_CONFIG = "adapter_config.json"
LOCAL_ADAPTER = f"pass a directory with {ADAPTER_CONFIG} and adapter_model.safetensors"

Fetch = Callable[[], object]
"""Downloads the weights; does nothing for a local checkpoint."""


def find(model: ModelConfig, load: LoadConfig) -> tuple[str, Fetch]:
    """The checkpoint's local directory with all but the weights, and a function that downloads these.

    Raises:
        ModelNotFound: it was not found; the message says where the search looked and what to do.
        Unsupported: a URL, or a GGUF file of an unknown architecture.
        ConfigError: `mmproj` does not fit.
    """
    path, fetch = _find(model, load)
    if load.mmproj is not None and not (Path(path) / LINK).is_file():
        raise ConfigError(f"mmproj={load.mmproj}: {model.model} is no GGUF model, which has its vision tower in a file of its own; leave it out")  # fmt: skip
    return path, fetch


def _find(model: ModelConfig, load: LoadConfig) -> tuple[str, Fetch]:
    name = model.model
    directory = Path(os.path.expanduser(name))
    mistral = "mistral" in (load.load_format, model.config_format)
    if os.path.isdir(directory):
        return _directory(directory.absolute(), mistral, load.mmproj), _nothing
    if os.path.isfile(EMBEDDED / name / "config.json") and "/" not in name:
        return str(EMBEDDED / name), _nothing
    if name.startswith(OBJECT_STORES):
        return _from_object_store(name, load)
    refuse_url("model", name, LOCAL)
    if os.path.isfile(directory):
        if is_gguf(directory):
            return checkpoint_folder(directory, load.mmproj), _nothing
        raise ModelNotFound(f"{directory} is a file; pass the directory that contains it")
    if (of_hub := gguf_name(name)) is not None:
        return _gguf_from_hub(*of_hub, model, load), _nothing
    if _is_path(name):
        raise ModelNotFound(f"{directory.absolute()} does not exist (model={name!r})")
    return _from_hub("model", model, load, LOCAL)


def locate(model: ModelConfig, load: LoadConfig) -> str:
    """As `find`, with the weights."""
    path, fetch = find(model, load)
    fetch()
    return path


def locate_tokenizer(path: str, model: ModelConfig, load: LoadConfig) -> str:
    """The local directory of the tokenizer: `path`, the model's directory, or the directory of `tokenizer`, without weights.

    Raises:
        ModelNotFound: it was not found.
        Unsupported: a URL.
    """
    name = model.tokenizer
    if name is None or name == model.model:
        return with_tokenizer_json(path)
    folder = Path(os.path.expanduser(name)).absolute()
    for found in (folder, EMBEDDED / name):
        if os.path.isdir(found):
            return with_tokenizer_json(str(found))
    refuse_url("tokenizer", name, LOCAL_TOKENIZER)
    if os.path.isfile(folder) or _is_path(name):
        what = "is a file" if os.path.isfile(folder) else "does not exist"
        raise ModelNotFound(f"tokenizer={name}: {folder} {what}; {LOCAL_TOKENIZER}")
    named = replace(model, model=name, revision=model.tokenizer_revision)
    load = replace(load, ignore_patterns=NO_TOKENIZER_FILES)
    return with_tokenizer_json(_from_hub("tokenizer", named, load, LOCAL_TOKENIZER)[0])


def find_adapter(path: str, load: LoadConfig, token: str | bool | None = None) -> str:
    """The absolute directory of a LoRA adapter: a directory, an embedded adapter, or a hub id, which is downloaded.

    Raises:
        ModelNotFound: there is no such directory or repository.
        Unsupported: a URL.
    """
    folder = Path(os.path.expanduser(path)).absolute()
    if os.path.isdir(folder):
        return str(folder)
    if "/" not in path and os.path.isfile(EMBEDDED / path / ADAPTER_CONFIG):
        return str(EMBEDDED / path)
    refuse_url("the adapter's path", path, LOCAL_ADAPTER)
    if os.path.isfile(folder) or _is_path(path):
        what = "is a file" if os.path.isfile(folder) else "does not exist"
        raise ModelNotFound(f"no adapter in {path}: {folder} {what}; {LOCAL_ADAPTER}")
    adapter, few = ModelConfig(model=path, hf_token=token), replace(load, ignore_patterns=[])
    found, fetch_weights = _from_hub("adapter", adapter, few, LOCAL_ADAPTER)
    fetch_weights()
    return found


def check_vocabulary(folder: str) -> None:
    """Raises ModelNotFound: the directory has no file with a vocabulary."""
    if not any(next(Path(folder).glob(pattern), None) for pattern in VOCABULARIES):
        raise no_tokenizer(folder, "it has no tokenizer.json, tokenizer.model or vocab.json")


def no_tokenizer(folder: str, why: str) -> ModelNotFound:
    return ModelNotFound(
        f"no tokenizer in {folder}: {why}; download the missing files, name another tokenizer with --tokenizer, or pass"
        " --skip-tokenizer-init to use token ids only"
    )


def _directory(folder: Path, mistral: bool = False, mmproj: str | None = None) -> str:
    """A checkpoint directory; a GGUF model in it counts if there are no other weights. `mistral`: of its files, take those
    in Mistral's format.

    Raises:
        ModelNotFound: it is none, or it has several GGUF models. As `mistral_folder`.
    """
    if mistral or is_mistral(folder):
        return mistral_folder(folder)
    others = any(next(folder.glob(pattern), None) for pattern in WEIGHT_FILES)
    if not others and (file := only_model(folder)) is not None:
        return checkpoint_folder(file, mmproj)
    if not (folder / "config.json").is_file():
        raise ModelNotFound(f"{folder} has no config.json, so it is not a checkpoint")
    return str(folder)


def _nothing() -> None:
    """Local weights need no download."""


def _is_path(name: str) -> bool:
    return name.startswith(("/", ".", "~")) or name.count("/") > 1 or not name.strip()


def refuse_url(option: str, name: str, local: str) -> None:
    """Raises Unsupported: the name is a URL; the remedy names the hub id in it, or says `local`."""
    if "://" not in name:
        return
    hub = "https://huggingface.co/"
    parts = name.removeprefix(hub).split("/")
    remedy = f"download it, and {local}"
    if name.startswith(hub) and len(parts) > 1:
        remedy = f"pass {parts[0]}/{parts[1]}"
    raise Unsupported(f"{option}={name} (a URL)", remedy)


# ------------------------------------------------------------------------------------ object stores


def _from_object_store(url: str, load: LoadConfig) -> tuple[str, Fetch]:
    """Download a checkpoint by the library of Run:ai's model streamer: first all but the weights.

    Raises:
        Unsupported: the library is not installed. ModelNotFound: the download failed, or has no config.json.
    """
    if importlib.util.find_spec("runai_model_streamer") is None:
        raise Unsupported(
            f"model={url} without runai_model_streamer",
            "install the extra `runai`, or download it, and pass the directory",
        )
    import runai_model_streamer
    from huggingface_hub.constants import HF_HUB_CACHE

    name = hashlib.blake2b(url.encode(), digest_size=8).hexdigest()
    folder = Path(load.download_dir or HF_HUB_CACHE) / "object-store" / name

    def pull(*patterns: str) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            runai_model_streamer.pull_files(
                url, str(folder), allow_pattern=list(patterns), ignore_pattern=load.ignore_patterns
            )
        except Exception as error:  # the library's clients have their own classes
            reason = _first_line(error)
            raise ModelNotFound(f"{url} could not be downloaded ({reason})") from None

    pull(*WANTED_FILES)
    if not (folder / "config.json").is_file():
        raise ModelNotFound(f"{url} has no config.json, so it is not a checkpoint")
    return str(folder), lambda: pull("*.safetensors")


# ------------------------------------------------------------------------------------ the hub


def _from_hub(option: str, model: ModelConfig, load: LoadConfig, local: str) -> tuple[str, Fetch]:
    """Download a hub repository without its weights, or find it in the local cache if the hub cannot be reached."""
    import huggingface_hub as hub
    from huggingface_hub.errors import GatedRepoError

    name = model.model
    about: dict[str, Any] = {
        "revision": model.revision,
        "cache_dir": load.download_dir,
        "token": model.hf_token,
    }
    try:
        found = hub.HfApi(token=model.hf_token).model_info(
            name, revision=model.revision, timeout=10
        )
        files = [file.rfilename for file in found.siblings or []]
        patterns = _patterns(files)
        if patterns == WANTED_FILES and any(file.endswith(".gguf") for file in files):
            return _gguf_from_hub(name, "", model, load), _nothing
        forced = "mistral" in (load.load_format, model.config_format)
        if option == "model" and (
            forced or ("params.json" in files and "config.json" not in files)
        ):
            allowed = [*WANTED_FILES, "consolidated*.safetensors"]
            folder = hub.snapshot_download(
                name, allow_patterns=allowed, ignore_patterns=load.ignore_patterns, **about
            )
            return mistral_folder(Path(folder)), _nothing

        def download(*ignored: str) -> str:
            ignore = [*load.ignore_patterns, *ignored]
            return hub.snapshot_download(
                name, allow_patterns=list(patterns), ignore_patterns=ignore, **about
            )

        folder = download(*WEIGHT_FILES)
        if any(file in HEAD_FILES for file in files):
            hub.snapshot_download(name, allow_patterns=list(HEAD_FILES), **about)
        return folder, lambda: _weights(name, download)
    except QuireError:
        raise
    except GatedRepoError:
        raise ModelNotFound(
            f"{name} on the hub requires you to accept its terms: accept them on its page, then pass --hf-token or"
            " run `hf auth login`"
        ) from None
    except Exception as error:
        reason = _why_no_repository(error)
    try:
        return hub.snapshot_download(name, local_files_only=True, **about), _nothing
    except Exception:
        cache = load.download_dir or hub.constants.HF_HUB_CACHE
        own, marker = "", {"model": "config.json", "adapter": ADAPTER_CONFIG}.get(option)
        if option == "model" and "/" not in name:
            own = ". Names on the hub look like meta-llama/Llama-3.2-1B-Instruct (docs/models.md)"
        if marker is not None:
            there = sorted(file.parent.name for file in EMBEDDED.glob(f"*/{marker}"))
            own += f"; or name one that comes with Quire: {', '.join(there)}"
        raise ModelNotFound(
            f"{option} {name!r} was not found: no directory {Path(name).absolute()}, nothing in {cache},"
            f" and {reason}. {local[0].upper()}{local[1:]}{own}."
        ) from None


def _gguf_from_hub(name: str, selection: str, model: ModelConfig, load: LoadConfig) -> str:
    """The directory of a GGUF model of the hub. Its metadata are in the file with its weights, which is downloaded first.

    Raises:
        ModelNotFound: there is no such file, or the hub cannot be reached and the cache does not have it.
    """
    import huggingface_hub as hub

    about: dict[str, Any] = {"revision": model.revision, "cache_dir": load.download_dir, "token": model.hf_token}  # fmt: skip
    try:
        try:
            api = hub.HfApi(token=model.hf_token)
            found = api.model_info(name, revision=model.revision, timeout=10)
            there = [file.rfilename for file in found.siblings or []]
            files = choose(there, name, selection)
            tower = load.mmproj or projector_of(there)
            wanted = [*files, tower] if tower in there else files
            folder = hub.snapshot_download(name, allow_patterns=wanted, **about)
        except QuireError:
            raise
        except Exception as error:
            reason = _why_no_repository(error)
            folder = hub.snapshot_download(name, local_files_only=True, **about)
            there = [str(file.relative_to(folder)) for file in Path(folder).rglob("*.gguf")]
            files = choose(there, name, selection)
            tower = load.mmproj or projector_of(there)
    except QuireError:
        raise
    except Exception:
        raise ModelNotFound(
            f"model {model.model!r} was not found: nothing in {load.download_dir or hub.constants.HF_HUB_CACHE}, and {reason}."
            " Download the file, and pass its path."
        ) from None
    of_hub = [Path(folder) / tower] if tower is not None and tower in there else []
    given = load.mmproj if load.mmproj is None or not of_hub else str(of_hub[0])
    return checkpoint_folder(Path(folder) / files[0], given, of_hub)


def _why_no_repository(error: Exception) -> str:
    """Why the hub gave no repository; the class of network errors depends on its HTTP client."""
    from huggingface_hub.errors import RepositoryNotFoundError

    if isinstance(error, RepositoryNotFoundError):
        return "the repository does not exist on the hub, or it is private and needs --hf-token"
    return f"the hub cannot be reached ({_first_line(error)})"


def _weights(name: str, download: Fetch) -> None:
    """Raises ModelNotFound: the download did not finish."""
    try:
        download()
    except Exception as error:
        raise ModelNotFound(
            f"the weights of {name} could not be downloaded ({_first_line(error)}); start again to continue the download"
        ) from None


def _patterns(files: list[str]) -> tuple[str, ...]:
    """Which files of a repository to fetch: of several weight formats, the first that Quire reads."""
    for pattern in WEIGHT_FILES:
        if any(Path(file).match(pattern) for file in files):
            return (*WANTED_FILES, pattern)
    return WANTED_FILES


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
