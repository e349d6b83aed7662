"""Writes the tables of docs/models.md and docs/choose-a-model.md from what is registered and what is tested.

    python -m tools.list_models            rewrite the page's tables
    python -m tools.list_models --check    exit with 1 if they are not what this would write

Knows the registry of native models, the rows of tests/models/archs.py and the rules of the generic backend.
Loads no model.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

from quire.config.short_names import short_names
from quire.models.registry import MODELS
from quire.models.transformers.modes import PER_REQUEST_TYPES, UNSUPPORTED_TYPES, choose_mode
from tests.models.archs import ARCHS, PAGED, PER_REQUEST
from tests.models.wrappers import WRAPPERS
from tools import starting_models
from tools.generated_tables import DOCS, main
from tools.hub_examples import examples

PAGE, CHOICE = DOCS / "models.md", DOCS / "choose-a-model.md"


def class_of(kind: str) -> str:
    """The class of Transformers that a `model_type` runs as; "" if there is none."""
    found = CLASSES.get(kind, "")
    return found if isinstance(found, str) else found[0]


def native() -> Iterator[str]:
    yield from architectures(decoders=True)


def encoders() -> Iterator[str]:
    yield from architectures(decoders=False)


def architectures(decoders: bool) -> Iterator[str]:
    yield "| architecture | examples on the hub | code |"
    yield "|---|---|---|"
    for architecture, target in MODELS.items():
        if architecture.endswith("ForCausalLM") == decoders:
            module = target.partition(":")[0].removeprefix("quire.").replace(".", "/")
            yield f"| `{architecture}` | {examples(architecture)} | `{module}.py` |"


def rows(mode: str) -> Iterator[str]:
    """One line a model type, however many variations of it are tested."""
    why = mode == PER_REQUEST
    yield "| `model_type` | architecture |" + (" because |" if why else " configurations tested |")
    yield "|---|---|---|"
    kinds = dict.fromkeys(arch.kind for arch in ARCHS if arch.mode == mode)
    for kind in kinds:
        tested = [arch for arch in ARCHS if arch.kind == kind and arch.mode == mode]
        last = str(len(tested))
        if why:
            last = (
                PER_REQUEST_TYPES.get(kind)
                or choose_mode({"model_type": kind, **tested[0].config})[1]
            )
            if last.startswith("every layer"):
                last = "found by the check at load"
        yield f"| `{kind}` | `{class_of(kind)}` | {last} |"


def wrappers() -> Iterator[str]:
    yield "| architecture | text runs as |"
    yield "|---|---|"
    for wrapper in WRAPPERS:
        yield f"| `{wrapper.architecture}` | {wrapper.runs_as} |"


def refused() -> Iterator[str]:
    yield "| `model_type` | because |"
    yield "|---|---|"
    for kind, reason in UNSUPPORTED_TYPES.items():
        yield f"| `{kind}` | {reason} |"


def short() -> Iterator[str]:
    yield "| short name | model | weights |"
    yield "|---|---|---|"
    names = short_names()
    for name, (model, quantization) in names.items():
        if ":" in name:
            family = name.partition(":")[0]
            also = f", `{family}`" if names[family].model == model else ""
            yield f"| `{name}`{also} | `{model}` | {quantization} |"


TABLES = {
    "short names": short,
    "models to start with": starting_models.rows,
    "native": native,
    "encoders": encoders,
    "paged": lambda: rows(PAGED),
    "per request": lambda: rows(PER_REQUEST),
    "wrappers": wrappers,
    "refused": refused,
}

CHOICES = {"short names by memory": starting_models.by_memory}


if __name__ == "__main__":
    sys.exit(main(__doc__, {PAGE: TABLES, CHOICE: CHOICES}))
