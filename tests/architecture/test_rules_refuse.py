"""Every rule refuses something: a check that cannot fail is worse than none."""

from __future__ import annotations

import pytest
from source_rules import MAX_FILE_LINES, MAX_FUNCTION_LINES, RULES, File

DOC = '"""A module."""\n'
LONG_FUNCTION = "def f():\n" + "    g()\n" * MAX_FUNCTION_LINES
FIELD = "@dataclass({})\nclass AConfig:\n    size: int = 1\n    {}\n"

# rule, path, a text that it must refuse, a similar text that it must accept
CASES = [
    (
        "layers",
        "quire/scheduler/a.py",
        "from quire.worker import rows",
        "from quire.kvcache import pool",
    ),
    ("layers", "quire/kvcache/a.py", "import quire.scheduler.gate", "import quire.protocol.plan"),
    (
        "layers",
        "quire/attention/a.py",
        "from quire.layers.attention import Attention",
        "if TYPE_CHECKING:\n    from quire.layers.attention import Attention",
    ),
    (
        "layers",
        "quire/models/a.py",
        "def f():\n    from quire.worker.request_rows import Rows",
        "x = 'quire.worker.request_rows:Rows'",
    ),
    ("layers", "quire/newroom/a.py", "import os", None),
    (
        "layers",
        "quire/api/a.py",
        "from quire import LLM",
        "from quire.engine.client import EngineClient",
    ),
    (
        "no_torch_in_the_torch_free_rooms",
        "quire/scheduler/a.py",
        "def f():\n    import torch",
        "import time",
    ),
    (
        "no_torch_in_the_torch_free_rooms",
        "quire/engine/core.py",
        "from torch.nn import Module",
        "x = 'torch'",
    ),
    (
        "no_torch_in_the_torch_free_rooms",
        "quire/server/a.py",
        "import transformers",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch import Tensor",
    ),
    (
        "features_are_known_where_they_are_switched_on",
        "quire/server/a.py",
        "from quire.features.any.gate import Gate",
        "from quire.scheduler.gate import Gate",
    ),
    ("short_files", "quire/a.py", "x = 1\n" * (MAX_FILE_LINES + 1), "x = 1\n" * MAX_FILE_LINES),
    ("short_functions", "quire/a.py", LONG_FUNCTION, LONG_FUNCTION.replace("    g()\n", "", 1)),
    ("short_functions", "quire/a.py", "async " + LONG_FUNCTION, "async def f(): ..."),
    ("names_that_say_something", "quire/worker/utils.py", "", None),
    ("no_asserts", "quire/a.py", "assert x > 0, 'x'", "if x <= 0:\n    raise ValueError('x')"),
    ("no_pickle", "quire/a.py", "import pickle", "import msgspec"),
    ("no_pickle", "quire/a.py", "from dill import loads", "from pickle import UnpicklingError"),
    ("no_pickle", "quire/a.py", "torch.load(p)", "torch.load(p, mmap=True, weights_only=True)"),
    ("no_pickle", "quire/a.py", "torch.load(p, weights_only=False)", "safetensors.load(p)"),
    ("no_pickle", "quire/a.py", "np.load(p, allow_pickle=True)", "np.load(p, allow_pickle=False)"),
    ("no_pickle", "quire/a.py", "eval(text)", "model.eval()"),
    (
        "children_do_not_search_the_working_directory",
        "quire/a.py",
        "words = [sys.executable, '-m', 'quire.engine.engine_main']",
        "words = [sys.executable, '-P', '-m', 'quire.engine.engine_main']",
    ),
    (
        "children_do_not_search_the_working_directory",
        "quire/a.py",
        "words = f'{shlex.quote(sys.executable)} -m quire'",
        "words = f'{shlex.quote(sys.executable)} -P -m quire'",
    ),
    (
        "children_do_not_search_the_working_directory",
        "quire/a.py",
        "from multiprocessing import Process",
        "from multiprocessing.connection import Pipe",
    ),
    (
        "children_do_not_search_the_working_directory",
        "quire/a.py",
        "from sys import executable",
        "from sys import flags",
    ),
    (
        "names_come_from_few_places",
        "quire/a.py",
        "importlib.import_module(name)",
        "importlib.import_module('flash_attn')",
    ),
    ("names_come_from_few_places", "quire/a.py", "thing = by_name(name)", "thing = named(name)"),
    (
        "kernels_name_no_family",
        "quire/native/a.py",
        "if type(model).__name__ == 'Eagle3':\n    pass",
        "parts = native_parts(model)",
    ),
    (
        "layers",
        "quire/native/a.py",
        "from quire.models.gemma4 import Gemma4Attention",
        "from quire.layers.norm import RMSNorm",
    ),
    ("the_core_names_no_feature", "quire/scheduler/a.py", "# the LoRA gate", "# any gate"),
    (
        "the_core_names_no_feature",
        "quire/engine/core.py",
        "if structured_output: ...",
        "supervision = 1",
    ),
    ("the_core_names_no_feature", "quire/worker/worker.py", "x = 'cuda'", "x = device"),
    ("the_core_names_no_feature", "quire/scheduler/a.py", "beam = 1", "# a request"),
    ("the_builders_name_no_feature", "quire/engine/build.py", "x = LoraGate()", "gates += more"),
    (
        "the_builders_name_no_feature",
        "quire/worker/build.py",
        "if feature.name == 'state_checkpoints': ...",
        "for feature in features: ...",
    ),
    ("the_builders_name_no_feature", "quire/worker/memory_plan.py", "adapters = 1", "lines = 1"),
    ("modules_say_what_they_know", "quire/a.py", "x = 1", DOC + "x = 1"),
    ("modules_say_what_they_know", "quire/worker/__init__.py", "", DOC),
    (
        "packages_import_nothing",
        "quire/worker/__init__.py",
        "import quire.worker.request_rows",
        DOC,
    ),
    (
        "the_environment_is_read_in_one_file",
        "quire/a.py",
        "x = os.environ['A']",
        "x = os.cpu_count()",
    ),
    ("the_environment_is_read_in_one_file", "quire/a.py", "x = os.getenv('A')", "x = os.getpid()"),
    (
        "the_environment_is_read_in_one_file",
        "quire/a.py",
        "from os import environ",
        "from os import path",
    ),
    ("no_global_that_changes", "quire/a.py", "def f():\n    global x\n    x = 1", "x = 1"),
    (
        "no_global_that_changes",
        "quire/a.py",
        "object.__setattr__(config, 'x', 1)",
        "replace(config, x=1)",
    ),
    (
        "configuration_is_frozen_and_documented",
        "quire/config/a.py",
        FIELD.format("frozen=True", ""),
        FIELD.format("frozen=True", '"""How large it is."""'),
    ),
    (
        "configuration_is_frozen_and_documented",
        "quire/config/a.py",
        FIELD.format("slots=True", '"""How large it is."""'),
        "class AConfig:\n    size: int = 1",
    ),
    (
        "devices_are_named_where_devices_live",
        "quire/worker/a.py",
        "x = torch.cuda.Stream()",
        "x = platform.stream()",
    ),
    (
        "devices_are_named_where_devices_live",
        "quire/models/a.py",
        "x.to('cuda:0')",
        "'cuda is a word in a docstring'",
    ),
    (
        "engine_clients_are_all_alike",
        "quire/server/a.py",
        "x = isinstance(self.client, InlineClient | ProcessClient)",
        "x = isinstance(client.state(), EngineState)",
    ),
]
BY_NAME = {rule.__name__: rule for rule in RULES}


@pytest.mark.parametrize(("name", "path", "bad", "good"), CASES)
def test_rule_refuses_what_it_forbids_and_nothing_else(name, path, bad, good):
    assert BY_NAME[name](File(path, bad)), f"{name} lets it pass"
    if good is not None:
        assert not BY_NAME[name](File(path, good))


def test_every_rule_has_a_case():
    assert set(BY_NAME) == {name for name, *_ in CASES}
