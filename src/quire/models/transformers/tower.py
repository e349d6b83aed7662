"""The towers of a wrapper, with their projectors, as Transformers has them; the language model inside it is left out.

Transformers builds the wrapper with no decoder layers, and reads the weights of all else. Pictures and videos go through its
`get_image_features` and `get_video_features`. Wrappers mask and pad sound each in its own way, inside `forward`: so sound goes
through `forward`, whose language model returns the embeddings that it gets. Knows wrappers of Transformers. Does not know
prompts, caches, or any family by name.

Shape suffixes: N rows of an item, D features of the language model, F = D for each layer of the tower that it takes.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from quire.config.engine import ModelSpec
from quire.errors import ConfigError, Unsupported
from quire.layers.lora import Place
from quire.logging import get_logger
from quire.models.checkpoint_files import tensors
from quire.models.media import MediaModel
from quire.models.progress import LoadProgress
from quire.models.transformers.adapters import places_of
from quire.models.transformers.load import NO_ADAPTER, quiet, read_config
from quire.models.vision_towers.base import as_tensor
from quire.protocol.media import TowerInput
from quire.quantization.dequantize_layers import with_floats

log = get_logger(__name__)

PIXELS, VIDEO_PIXELS = "pixel_values", "pixel_values_videos"
PARTS = {"vision": ("vision", "visual"), "audio": ("audio",)}
"""By tower: what the names of its modules in a wrapper contain."""
LANGUAGE = ("language_model.", "lm_head.")
"""What names of the language model's tensors contain."""


class TransformersTower:
    """The towers that `model` says; others of the wrapper take no memory.

    Raises:
        Unsupported: Transformers has no such wrapper. ConfigError: the checkpoint lacks weights of a tower.
    """

    def __init__(self, spec: ModelSpec, model: MediaModel, device: torch.device | str):
        kind: Any = getattr(transformers, model.architecture, None)
        if kind is None or (model.vision is not None and not hasattr(kind, "get_image_features")):
            raise Unsupported(f"pictures and sound for {model.architecture}", "send text")
        self.device, self.dtype = device, getattr(torch, spec.dtype)
        self.inner_width = model.width * model.inner_layers
        """Features that the language model's first layers add: none of a sound."""
        self.width, self.audio_token_id = model.width, None if model.audio is None else model.audio.token_id  # fmt: skip
        unused = [name for name in PARTS if getattr(model, name) is None]
        self.model: Any = self._load(kind, spec, unused).to(device).eval()
        self._return_embeddings()
        self._names = frozenset(name for name, _ in self.model.named_modules())
        self._takes = self._arguments("get_image_features") | self._arguments("get_video_features")
        self._hears = self._arguments("forward")
        size = sum(parameter.nbytes for parameter in self.model.parameters())
        log.info("the towers of %s take %.2f GiB", model.architecture, size / 2**30)

    @torch.inference_mode()
    def encode(self, items: Sequence[TowerInput]) -> list[Tensor]:
        """See `_encode`: one after the other, because Transformers pads pictures of a batch."""
        return [self._encode(item) for item in items]

    def adapter_places(self) -> dict[str, Place]:
        """As of a language model."""
        return places_of(self.model)

    def adapter_name(self, module: str) -> str | None:
        """See `AdaptedEncoder` (layers/lora.py). Checkpoints of older versions have other prefixes."""
        names = (module, f"model.{module}", module.partition(".")[2])
        return next((name for name in names if name in self._names), "")

    def _encode(self, item: TowerInput) -> Tensor:
        """rows_NF of an item, in the order of its tokens: of the last layer, then of the inner ones that the language model takes.

        Raises:
            ValueError, RuntimeError, TypeError: the tower cannot take its tensors.
        """
        is_picture = not {PIXELS, VIDEO_PIXELS}.isdisjoint(item.tensors)
        takes = self._takes if is_picture else self._hears
        given = {
            name: as_tensor(data, self.device, self.dtype)
            for name, data in item.tensors.items()
            if name in takes
        }
        if not is_picture:
            return self._heard(given, item.num_rows)
        features = self._method("get_video_features" if VIDEO_PIXELS in given else "get_image_features")  # fmt: skip
        output = features(**given, return_dict=True)
        inner = getattr(output, "deepstack_features", None) or ()
        rows_ND = output.pooler_output
        if rows_ND is None:  # some wrappers project later
            rows_ND = self.model.multi_modal_projector(output.last_hidden_state.flatten(0, 1))
        return torch.cat([rows_of(rows_ND), *map(rows_of, inner)], -1)

    def _heard(self, given: dict[str, Tensor], num_rows: int) -> Tensor:
        """What the wrapper puts in the place of a sound's tokens. One other token is before them: some wrappers see no sound in
        a prompt of one token."""
        tokens = [0 if self.audio_token_id else 1, *[self.audio_token_id] * num_rows]
        ids_1T = torch.tensor([tokens], device=self.device)
        for name in [name for name in given if name.endswith("mask")]:
            given[name] = given[name].bool()
        output = self.model.base_model(
            input_ids=ids_1T, attention_mask=torch.ones_like(ids_1T), use_cache=False, return_dict=True,
            position_ids=torch.arange(len(tokens), device=self.device)[None], **given,
        )  # fmt: skip
        rows_ND: Tensor = output.last_hidden_state[0, 1:]
        return nn.functional.pad(rows_ND, (0, self.inner_width))

    def _return_embeddings(self) -> None:
        """The language model inside the wrapper returns the embeddings that it gets; the embeddings of texts are zeros."""
        model, width, dtype = self.model, self.width, self.dtype

        def embeddings(ids: Tensor, *_: Any, **__: Any) -> Tensor:
            return torch.zeros(*ids.shape, width, dtype=dtype, device=ids.device)

        def same(*_: Any, inputs_embeds: Tensor, **__: Any) -> BaseModelOutputWithPast:
            return BaseModelOutputWithPast(last_hidden_state=inputs_embeds)

        decoder = model.get_decoder()
        model.get_input_embeddings().forward = embeddings
        decoder.forward = same
        if hasattr(decoder, "get_per_layer_inputs"):  # embeddings of texts for each layer
            decoder.get_per_layer_inputs = lambda *_: None

    def _arguments(self, method: str) -> set[str]:
        """Of a method of the wrapper's inner model, if there is one: the wrapper's own has not all names."""
        found = self._method(method, of_inner=True)
        return (
            set()
            if found is None
            else set(inspect.signature(found).parameters) - {"self", "kwargs"}
        )

    def _method(self, name: str, of_inner: bool = False) -> Any:
        """Of the wrapper, or of its inner model, which may be the only one that has it; None: neither does."""
        places = [self.model, getattr(self.model, "model", None)]
        found = (getattr(place, name, None) for place in (reversed(places) if of_inner else places))
        return next((one for one in found if one is not None), None)

    def _floats(self, spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a quantized checkpoint that are not the language model's, as floats."""
        found = tensors(spec.path, spec.load.load_format, spec.hf_config, spec.dtype)
        own = (each for each in found if not any(part in each[0] for part in LANGUAGE))
        return own if spec.stored is None else with_floats(own, spec.stored, self.dtype)

    def _load(self, kind: Any, spec: ModelSpec, unused: Sequence[str]) -> PreTrainedModel:
        config = read_config(spec)
        if not isinstance(config, kind.config_class):  # of a model that also speaks
            config = getattr(config, "thinker_config", config)
        _without_layers(config)
        configs = [type(getattr(config, f"{name}_config", None)) for name in unused]
        with _not_made(kind, configs), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Initializing zero-element")  # of no layers
            model = self._made(kind, config, spec)
        _drop_language_model(model)
        _drop_parts(model, unused)
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        return model

    def _made(self, kind: Any, config: Any, spec: ModelSpec) -> PreTrainedModel:
        """The wrapper, with weights."""
        if spec.load.load_format == "dummy":
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(spec.options.seed)
                model: Any = kind._from_config(config, dtype=self.dtype)
        else:
            place: Any = spec.path
            floats = None if spec.stored is None else dict(self._floats(spec))
            if floats is not None:  # Transformers would want the library of each format
                place, config.quantization_config = None, None
            with quiet(LoadProgress()):
                model, info = kind.from_pretrained(
                    place, config=config, dtype=self.dtype, local_files_only=True, state_dict=floats,
                    output_loading_info=True, adapter_kwargs=NO_ADAPTER, ignore_mismatched_sizes=True,
                )  # fmt: skip
            _check(info, model, spec)
        return model


@contextmanager
def _not_made(kind: Any, configs: Sequence[type]) -> Iterator[None]:
    """Inside, wrappers of this class make nothing of configs of these classes: some towers need libraries that nothing else needs."""
    module = vars(sys.modules[kind.__module__])
    auto = module.get("AutoModel")
    if auto is None:
        yield
        return

    def made(config: Any, *args: Any, **more: Any) -> Any:
        return nn.Identity() if type(config) in configs else auto.from_config(config, *args, **more)

    module["AutoModel"] = type("AutoModel", (auto,), {"from_config": staticmethod(made)})
    try:
        yield
    finally:
        module["AutoModel"] = auto


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
    """Raises ConfigError: the checkpoint lacks weights of the towers, or has them in other shapes."""
    own = [name for name, _ in model.named_parameters()]
    language = _names_of_language_model(model)
    for what, names in (
        ("lacks", info["missing_keys"]),
        ("has other shapes of", info["mismatched_keys"]),
    ):
        flat = [name if isinstance(name, str) else name[0] for name in names]
        if wrong := sorted(name for name in flat if name in own and not name.startswith(language)):
            raise ConfigError(
                f"the checkpoint in {spec.path} {what} {len(wrong)} weights of the towers: {', '.join(wrong[:5])}. Check"
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
        _free(part)


def _drop_parts(model: PreTrainedModel, towers: Sequence[str]) -> None:
    """Free towers that no request can use, but no embeddings: Gemma 3n looks up markers of pictures in every prompt."""
    for name, module in model.base_model.named_children():
        is_part = any(part in name for tower in towers for part in PARTS[tower])
        if is_part and not name.startswith("embed"):
            _free(module)


def _free(part: nn.Module) -> None:
    for module in part.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(weight.new_empty(0), requires_grad=False))
