"""The vision tower of a wrapper, with its projector, as Transformers has it; the language model inside it is left out.

Transformers builds the wrapper with no decoder layers, reads the weights of all else, and its `get_image_features` encodes.
Knows wrappers of Transformers. Does not know prompts, caches, or any family by name.

Shape suffixes: N rows of a picture, D features of the language model, F = D for each layer of the tower that it takes.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from quire.config.engine import ModelSpec
from quire.errors import ConfigError, Unsupported
from quire.logging import get_logger
from quire.models.progress import LoadProgress
from quire.models.transformers.load import quiet, read_config
from quire.protocol.media import Picture
from quire.protocol.tensor_data import TensorData

log = get_logger(__name__)

VIDEO_PIXELS = "pixel_values_videos"


class TransformersTower:
    """`architecture`: of the wrapper.

    Raises:
        Unsupported: Transformers has no such wrapper. ConfigError: the checkpoint lacks weights of the tower.
    """

    def __init__(self, spec: ModelSpec, architecture: str, device: torch.device | str):
        kind: Any = getattr(transformers, architecture, None)
        if kind is None or not hasattr(kind, "get_image_features"):
            raise Unsupported(f"pictures for {architecture}", "send text")
        self.device, self.dtype = device, getattr(torch, spec.dtype)
        self.model = self._load(kind, spec).to(device).eval()
        self._takes = self._arguments("get_image_features") | self._arguments("get_video_features")
        size = sum(parameter.nbytes for parameter in self.model.parameters())
        log.info("the vision tower of %s takes %.2f GiB", architecture, size / 2**30)

    @torch.inference_mode()
    def encode(self, picture: Picture) -> Tensor:
        """rows_NF of a picture, in the order of its tokens: of the last layer, then of the inner ones that the language model takes.

        Raises:
            ValueError, RuntimeError, TypeError: the tower cannot take its tensors.
        """
        given = {
            name: self._tensor(tensor)
            for name, tensor in picture.tensors.items()
            if name in self._takes
        }
        features: Any = self.model.get_video_features if VIDEO_PIXELS in given else self.model.get_image_features  # fmt: skip
        output = features(**given, return_dict=True)
        inner = getattr(output, "deepstack_features", None) or ()
        return torch.cat([rows_of(output.pooler_output), *map(rows_of, inner)], -1)

    def _tensor(self, data: TensorData) -> Tensor:
        copied = bytearray(data.data)  # torch wants memory that may be written
        tensor = torch.frombuffer(copied, dtype=getattr(torch, data.dtype)).view(data.shape)
        return tensor.to(self.device, self.dtype if tensor.is_floating_point() else tensor.dtype)

    def _arguments(self, method: str) -> set[str]:
        """Of a method of the wrapper's inner model, if there is one: the wrapper's own has not all names."""
        inner = getattr(self.model, "model", None)
        found = getattr(inner, method, None) or getattr(self.model, method, None)
        return (
            set()
            if found is None
            else set(inspect.signature(found).parameters) - {"self", "kwargs"}
        )

    def _load(self, kind: Any, spec: ModelSpec) -> PreTrainedModel:
        config = read_config(spec)
        _without_layers(config)
        if spec.load.load_format == "dummy":
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(spec.options.seed)
                model = kind._from_config(config, dtype=self.dtype)
        else:
            with quiet(LoadProgress()):
                model, info = kind.from_pretrained(
                    spec.path, config=config, dtype=self.dtype, local_files_only=True,
                    output_loading_info=True,
                )  # fmt: skip
            _check(info, model, spec)
        _drop_language_model(model)
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        return model


def rows_of(features: Any) -> Tensor:
    """[N, D], from what `get_image_features` gives: tensors of tiles or pictures, or a list of them."""
    parts = features if isinstance(features, list | tuple) else [features]
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


def _without_layers(config: PreTrainedConfig) -> None:
    text = config.get_text_config(decoder=True)
    text.num_hidden_layers = 0
    if getattr(text, "layer_types", None) is not None:
        text.layer_types = []
    for name in ("hidden_size_per_layer_input", "num_kv_shared_layers"):  # Gemma 4
        if getattr(text, name, None):
            setattr(text, name, 0)


def _check(info: Mapping[str, Any], model: PreTrainedModel, spec: ModelSpec) -> None:
    """Raises ConfigError: the checkpoint lacks weights of the tower, or has them in other shapes."""
    own = [name for name, _ in model.named_parameters()]
    language = _names_of_language_model(model)
    for what, names in (
        ("lacks", info["missing_keys"]),
        ("has other shapes of", info["mismatched_keys"]),
    ):
        flat = [name if isinstance(name, str) else name[0] for name in names]
        if wrong := sorted(name for name in flat if name in own and not name.startswith(language)):
            raise ConfigError(
                f"the checkpoint in {spec.path} {what} {len(wrong)} weights of the vision tower: {', '.join(wrong[:5])}. Check"
                " that the download is complete, or serve only its text model with --language-model-only"
            )


def _language_parts(model: PreTrainedModel) -> list[nn.Module]:
    parts = (model.get_decoder(), model.get_output_embeddings(), model.get_input_embeddings())
    return [part for part in parts if part is not None]


def _names_of_language_model(model: PreTrainedModel) -> tuple[str, ...]:
    parts = _language_parts(model)
    return tuple(name for name, module in model.named_modules() if name and any(module is part for part in parts))  # fmt: skip


def _drop_language_model(model: PreTrainedModel) -> None:
    """Free the embeddings and the head: the language model of the engine has its own."""
    for part in _language_parts(model):
        for module in part.modules():
            for name, weight in list(module.named_parameters(recurse=False)):
                module.register_parameter(name, nn.Parameter(weight.new_empty(0), requires_grad=False))  # fmt: skip
