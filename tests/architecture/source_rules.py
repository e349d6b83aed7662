"""The rules for every source file, each a function from a file to its violations.

Knows source text and syntax trees. Imports nothing of the package: test_rooms.py checks what only a running interpreter
shows. Each rule has an example that it must refuse in test_rules_refuse.py.
"""

from __future__ import annotations

import ast
import itertools
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"

MAX_FILE_LINES = 420
MAX_FUNCTION_LINES = 80

# Highest first. A package imports those below it, never those on its level or above.
ORDER = [
    {"compat"},
    {"cli"},
    {"bench", "router"},
    {"server"},
    {"api"},
    {"frontend"},
    # their control calls use the engine; the engine loads their modules by name
    {"features"},
    {"engine"},
    {"observe"},
    {"executor", "scheduler", "worker"},
    {"models", "native"},
    {"quantization"},
    {"layers"},
    {"attention"},
    {"forward_context"},
    {"parallel"},
    {"ops"},
    {"platforms"},
    {"kvcache", "kvstore", "processes", "embedded"},
    {"config"},
    {"protocol"},
    {"plugins"},
    {"logging"},
    {"env", "errors", "startup_timer", "terminal", "version"},
]
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names}

# Exceptions, each with its reason. A line here is a decision that a reviewer sees.
LONG_FUNCTIONS: dict[str, str] = {}
FOR_ANNOTATIONS = {  # (package, package whose types it names, under TYPE_CHECKING only)
    ("attention", "layers"): "a backend is handed the layer it serves",
    ("native", "worker"): "the native step reads the arrays of the worker's rows and sampler",
    ("executor", "worker"): "the inline executor is handed the worker it runs",
}
ASKS_FOR_FEATURES = {  # files that may import features: the others must not know that features exist
    "quire/cli/replay.py": "its option names adapters, which a recording needs and does not have",
    "quire/frontend/input_processor.py": "a request that a feature cannot serve is refused before it travels",
}
IMPORTS_BY_NAME = {  # file: source of the names
    "quire/__init__.py": "a table of ours",
    "quire/cli/main.py": "a table of ours",
    "quire/bench/__main__.py": "a table of ours",
    "quire/compat/vllm_shim.py": "a table of ours",
    "quire/config/options.py": "the section's own module",
    "quire/plugins.py": "a constant",
    "quire/attention/base.py": "a table of ours, and plug-ins that are installed",
    "quire/platforms/base.py": "a table of ours",
    "quire/ops/dispatch.py": "a table of ours",
    "quire/observe/tracing.py": "a table of ours",
    "quire/engine/enabled_features.py": "a table of ours",
    "quire/frontend/prompt_reader.py": "the feature's class, a constant",
    "quire/models/construction.py": "a table of ours, and plug-ins that are installed",
    "quire/config/serialize.py": "functions and classes that the user gave (hf_overrides, logits_processors)",
    "quire/frontend/media/media_process.py": "Transformers' table of processors",
    "quire/worker/sampling/load_processors.py": "the user's --logits-processors",
    "quire/worker/module_hooks.py": "the user's --worker-extension-cls",
    "quire/frontend/parsers/plugins.py": "a constant: what makes `import vllm` mean Quire, for a plug-in's file",
    "quire/frontend/parsers/parser_classes.py": "the program, which registers the class of a parser",
    "quire/features/speculation/methods.py": "the class of the user's speculative_config",
    "quire/server/user_middleware.py": "the user's --middleware",
    "quire/executor/worker_main.py": "the parent, which wrote it as a constant",
}
GLOBALS = {
    (
        "quire/models/transformers/paged.py",
        "_calls",
    ): "the probe that runs now; a second one waits",
    ("quire/models/transformers/self_check.py", "_rows"): "the check that runs now; likewise",
}

# Modules that must load without torch, and whose code never imports it, not even in a function.
NEVER_TORCH = re.compile(
    r"quire/(protocol|config|kvcache|kvstore|scheduler|server|observe|processes)/"
    r"|quire/engine/(?!build\.py)|quire/worker/(build|memory_plan)\.py|quire/executor/(__init__|base|inline|process)\.py"
    r"|quire/models/(hf_config|registry|__init__)\.py|quire/platforms/detect\.py"
    r"|quire/(env|errors|logging|plugins)\.py|quire/features/\w+/(feature|gate)\.py"
)
CORE = re.compile(r"quire/scheduler/|quire/engine/core\.py|quire/worker/worker\.py")
SAYS_CUDA = re.compile(r"quire/(platforms|attention|ops/triton|ops/cpu)/|quire/worker/graphs\.py")
FEATURES = re.compile(
    r"(?<![a-z])(lora|grammar|guided|structured|speculat|eagle|medusa|multimodal|vision|audio|pooling"
    r"|nixl|lmcache|connector|cuda|beam|thinking|fair.?share|sleep|tool.?call)",
    re.IGNORECASE,
)
BUILDERS = re.compile(
    r"quire/engine/(build|build_executor)\.py|quire/worker/(build|memory_plan)\.py"
    r"|quire/frontend/output_processor\.py"
)
NICKNAMES = r"lora(?!_request)|adapter|grammar|speculat|drafter|eagle|eplb|tenant|fair.?share|thinking|budget"
"""Of features. The names of their folders are forbidden, too, except SHARED_NAMES."""
SHARED_NAMES = {"pipeline": "the stages of ranks", "lora": "above, but for the field of vLLM"}
GENERAL_MODULES = {"encoder"}
"""Modules of families whose names are general words."""
NAMELESS = {"utils", "util", "helpers", "common", "misc"}
PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal"}


@dataclass(frozen=True)
class File:
    """`path` is relative to src/, with forward slashes: quire/forward_context.py."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @property
    def package(self) -> str:
        """Its package or top-level module: env, worker, ...; "" for quire itself."""
        parts = self.path.split("/")
        if len(parts) == 2:
            return parts[1].removesuffix(".py").removeprefix("__init__").removeprefix("__main__")
        return parts[1]


@cache
def source_files() -> list[File]:
    return [
        File(path.relative_to(SOURCE).as_posix(), path.read_text(encoding="utf-8"))
        for path in sorted(SOURCE.rglob("*.py"))
    ]


def imported(node: ast.AST) -> list[str]:
    """Full dotted names that an import statement may load; [] for any other node."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


@cache
def imports(file: File) -> tuple[str, ...]:
    return tuple(name for node in file.nodes for name in imported(node))


Rule = Callable[[File], list[str]]
RULES: list[Rule] = []


def rule(check: Rule) -> Rule:
    RULES.append(check)
    return check


@rule
def layers(file: File) -> list[str]:
    """A package imports only packages below it."""
    here = file.package
    if not file.path.startswith("quire/") or not here:
        return []
    if here not in LEVEL:
        return [f"{file.path}: package {here} has no place in ORDER"]
    types_only = for_annotations(file)
    wrong = []
    for node in file.nodes:
        for name in imported(node):
            if not name.startswith("quire."):
                continue
            there = name.split(".")[1]
            if there == here or there.startswith("__"):  # quire.__version__, not a package
                continue
            if id(node) in types_only and (here, there) in FOR_ANNOTATIONS:
                continue
            if there not in LEVEL:
                wrong.append(f"{file.path}: import {there} from its own module, not from quire")
            elif LEVEL[there] <= LEVEL[here]:
                wrong.append(f"{file.path}: {here} may not import quire.{there}")
    return wrong


@rule
def features_are_known_where_they_are_switched_on(file: File) -> list[str]:
    if file.path.startswith("quire/features/") or file.path in ASKS_FOR_FEATURES:
        return []
    return [
        f"{file.path}: imports {name}; a feature plugs in, the core does not import it"
        for name in imports(file)
        if name.startswith("quire.features")
    ]


@rule
def no_torch_in_the_torch_free_rooms(file: File) -> list[str]:
    if not NEVER_TORCH.match(file.path):
        return []
    annotations = for_annotations(file)
    return [
        f"{file.path}:{node.lineno}: imports {name}"
        for node in file.nodes
        for name in imported(node)
        if name.split(".")[0] in {"torch", "transformers"} and id(node) not in annotations
    ]


def for_annotations(file: File) -> set[int]:
    """Ids of the nodes under `if TYPE_CHECKING:`."""
    return {id(inner) for node in file.nodes if _only_for_types(node) for inner in ast.walk(node)}


def _only_for_types(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
    )


@rule
def short_files(file: File) -> list[str]:
    lines = file.text.count("\n")
    return (
        [f"{file.path}: {lines} lines, at most {MAX_FILE_LINES}"] if lines > MAX_FILE_LINES else []
    )


@rule
def short_functions(file: File) -> list[str]:
    wrong = []
    for node in file.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES and f"{file.path}:{node.name}" not in LONG_FUNCTIONS:
                wrong.append(
                    f"{file.path}: {node.name} has {lines} lines, at most {MAX_FUNCTION_LINES}"
                )
    return wrong


@rule
def names_that_say_something(file: File) -> list[str]:
    name = Path(file.path).stem
    return [f"{file.path}: a helper lives with its user or gets a name"] if name in NAMELESS else []


@rule
def no_asserts(file: File) -> list[str]:
    """`python -O` removes them, and their message is written for developers, not for the user who gets it."""
    return [
        f"{file.path}:{node.lineno}: assert; raise an error that says what and why"
        for node in file.nodes
        if isinstance(node, ast.Assert)
    ]


@rule
def no_pickle(file: File) -> list[str]:
    """Quire must not run code that comes as data."""
    wrong = [
        f"{file.path}: imports {name}"
        for name in imports(file)
        if name.split(".")[0] in PICKLES
        and name != "pickle.UnpicklingError"  # torch.load raises it
    ]
    for node in file.nodes:
        if not isinstance(node, ast.Call):
            continue
        called, flags = ast.unparse(node.func), {k.arg: k.value for k in node.keywords}
        if called == "torch.load" and not _is_true(flags.get("weights_only")):
            wrong.append(f"{file.path}:{node.lineno}: torch.load without weights_only=True")
        if "allow_pickle" in flags and not _is_false(flags["allow_pickle"]):
            wrong.append(f"{file.path}:{node.lineno}: allow_pickle")
        if called in {"eval", "exec", "yaml.load"}:
            wrong.append(f"{file.path}:{node.lineno}: {called}")
    return wrong


def _is_true(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Constant) and value.value is True


def _is_false(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is False


@rule
def children_do_not_search_the_working_directory(file: File) -> list[str]:
    """`python -m` puts it first on sys.path, and it may be a checkpoint's: each command has -P after the interpreter."""
    safe = {
        id(first)
        for node in file.nodes
        if isinstance(node, ast.List)
        for first, second in itertools.pairwise(node.elts)
        if isinstance(second, ast.Constant) and second.value == "-P"
    } | {
        id(inner)
        for node in file.nodes
        if isinstance(node, ast.JoinedStr)
        for first, second in itertools.pairwise(node.values)
        if isinstance(second, ast.Constant) and str(second.value).startswith(" -P ")
        for inner in ast.walk(first)
    }
    wrong = [
        f"{file.path}:{node.lineno}: sys.executable without -P after it"
        for node in file.nodes
        if isinstance(node, ast.Attribute)
        and ast.unparse(node) == "sys.executable"
        and id(node) not in safe
    ]
    spawners = ("multiprocessing.", "concurrent.futures.ProcessPoolExecutor", "sys.executable")
    return wrong + [
        f'{file.path}: imports {name}; start a program of ours with `sys.executable, "-P"`'
        for name in imports(file)
        if name.startswith(spawners) and not name.startswith("multiprocessing.connection.")
    ]


@rule
def names_come_from_few_places(file: File) -> list[str]:
    """Data must not choose what is imported: only these files import a module whose name is computed."""
    if file.path in IMPORTS_BY_NAME:
        return []
    return [
        f"{file.path}:{node.lineno}: {ast.unparse(node)}; may data name it? see IMPORTS_BY_NAME"
        for node in file.nodes
        if isinstance(node, ast.Call)
        and ast.unparse(node.func)
        in {"importlib.import_module", "import_module", "__import__", "by_name"}
        and not (node.args and isinstance(node.args[0], ast.Constant))
    ]


@rule
def the_core_names_no_feature(file: File) -> list[str]:
    if not CORE.match(file.path):
        return []
    return [
        f"{file.path}:{number}: the core says {found[0]!r}"
        for number, line in enumerate(file.text.splitlines(), 1)
        if (found := FEATURES.search(line))
    ]


@rule
def the_builders_name_no_feature(file: File) -> list[str]:
    """They call the methods of `quire.engine.feature.Feature`; only the list of features has names."""
    if not BUILDERS.match(file.path):
        return []
    names = [name for name in feature_names() if name not in SHARED_NAMES]
    own = rf"(?<![a-z])(?:{'|'.join(names)})"  # "intermediate" does not name media
    forbidden = re.compile(f"{NICKNAMES}|{own}", re.IGNORECASE)
    return [
        f"{file.path}:{number}: a builder says {found[0]!r}"
        for number, line in enumerate(file.text.splitlines(), 1)
        if (found := forbidden.search(line))
    ]


@cache
def feature_names() -> list[str]:
    return sorted(path.parent.name for path in (SOURCE / "quire/features").glob("*/feature.py"))


@rule
def modules_say_what_they_know(file: File) -> list[str]:
    return [] if ast.get_docstring(file.tree) else [f"{file.path}: no module docstring"]


@rule
def packages_import_nothing(file: File) -> list[str]:
    """Importing one module of a package then loads only that module. quire/__init__.py is lazy instead."""
    if not file.path.endswith("/__init__.py") or file.path.count("/") == 1:
        return []
    return [
        f"{file.path}: imports {name}" for name in imports(file) if name != "__future__.annotations"
    ]


@rule
def the_environment_is_read_in_one_file(file: File) -> list[str]:
    if file.path == "quire/env.py":
        return []
    names = {"os.environ", "os.getenv", "os.putenv", "os.environb"}
    wrong = [f"{file.path}: imports {name}" for name in imports(file) if name in names]
    wrong += [
        f"{file.path}:{node.lineno}: {ast.unparse(node)} (quire/env.py has the environment)"
        for node in file.nodes
        if isinstance(node, ast.Attribute) and ast.unparse(node) in names
    ]
    return wrong


@rule
def no_global_that_changes(file: File) -> list[str]:
    wrong = [
        f"{file.path}:{node.lineno}: global {name}"
        for node in file.nodes
        if isinstance(node, ast.Global)
        for name in node.names
        if (file.path, name) not in GLOBALS
    ]
    wrong += [
        f"{file.path}:{node.lineno}: changes a frozen object"
        for node in file.nodes
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "object.__setattr__"
    ]
    return wrong


@rule
def configuration_is_frozen_and_documented(file: File) -> list[str]:
    """In config/, each dataclass is frozen and each field has a sentence below it."""
    if not file.path.startswith("quire/config/"):
        return []
    wrong = []
    for node in file.nodes:
        if not isinstance(node, ast.ClassDef) or "dataclass" not in ast.unparse(
            node.decorator_list or []
        ):
            continue
        if not any("frozen=True" in ast.unparse(d) for d in node.decorator_list):
            wrong.append(f"{file.path}: {node.name} is not frozen")
        if not node.name.endswith("Config") or node.name == "EngineConfig":
            continue
        for field, below in zip(node.body, [*node.body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign) and not _is_sentence(below):
                wrong.append(f"{file.path}: {node.name}.{ast.unparse(field.target)} says nothing")
    return wrong


def _is_sentence(node: ast.stmt | None) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        and len(node.value.value) > 8
    )


@rule
def devices_are_named_where_devices_live(file: File) -> list[str]:
    """The worker, the models and the engine run on any device: they have no branch on a device's name."""
    rooms = re.match(r"quire/(worker|models|layers|scheduler|kvcache|executor|engine)/", file.path)
    if not rooms or SAYS_CUDA.match(file.path):
        return []
    documented = {id(node.value) for node in file.nodes if isinstance(node, ast.Expr)}
    return [
        f"{file.path}:{node.lineno}: says {ast.unparse(node)}"
        for node in file.nodes
        if (isinstance(node, ast.Attribute) and node.attr == "cuda")
        or (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and re.match(r"cuda\b", node.value)
            and id(node) not in documented
        )
    ]


@cache
def families() -> re.Pattern[str]:
    """The modules and classes of native families and speculators, as words."""
    models = SOURCE / "quire/models"
    table = tomllib.loads((models / "families.toml").read_text())["architectures"]
    names = {name for place in table.values() for name in place.split(":")} - GENERAL_MODULES
    for path in (models / "speculators").glob("*.py"):
        classes = re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE)
        names.update(classes if path.stem not in ("base", "spec") else ())
    return re.compile(rf"\b({'|'.join(sorted(names))})\b", re.IGNORECASE)


@rule
def kernels_name_no_family(file: File) -> list[str]:
    """`native` knows the parts that models declare (`layers/native_parts.py`): a family of known parts needs no line there."""
    if not file.path.startswith("quire/native/"):
        return []
    lines = enumerate(file.text.splitlines(), 1)
    return [
        f"{file.path}:{at}: names {name}" for at, line in lines for name in families().findall(line)
    ]


@rule
def engine_clients_are_all_alike(file: File) -> list[str]:
    """Code above the engine uses the methods of `EngineClient` and does not check where the engine runs."""
    return [
        f"{file.path}:{node.lineno}: {ast.unparse(node)}; give EngineClient the method that is missing"
        for node in file.nodes
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "isinstance"
        and any(
            isinstance(inner, ast.Name) and inner.id.endswith("Client")
            for kind in node.args[1:]
            for inner in ast.walk(kind)
        )
    ]
