"""The names of grammar backends: each one is accepted, and llguidance serves its requests."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "equality"))

from engines import engine

from quire.config.engine_args import EngineArgs
from quire.config.structured import BACKENDS
from quire.config.validate import check_options
from quire.errors import ConfigError
from quire.frontend.request_manager import RequestManager
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.structured_outputs import StructuredOutputsParams as Form

OTHERS = ("xgrammar", "xgrammar:no-fallback", "outlines", "lm-format-enforcer")


@pytest.mark.parametrize("name", [*OTHERS, "guidance", "llguidance", "auto"])
def test_the_start_says_once_which_library_serves(name: str, caplog: Any):
    config = EngineArgs(structured_outputs_config={"backend": name}).create_engine_config()
    with caplog.at_level("WARNING", logger="quire"):
        check_options(config)
    lines = [
        r.getMessage() for r in caplog.records if "structured_outputs_config" in r.getMessage()
    ]
    backend = name.partition(":")[0]
    expected = f"structured_outputs_config.backend={backend}: llguidance serves these requests"
    assert lines == ([expected] if name in OTHERS else [])


def test_an_unknown_name_is_refused_with_all_names():
    with pytest.raises(ConfigError, match=re.escape(", ".join(BACKENDS))):
        check_options(
            EngineArgs(structured_outputs_config={"backend": "xgramar"}).create_engine_config()
        )


@pytest.mark.slow
def test_each_name_gives_the_same_tokens():
    forms = [
        Form(regex="[a-z]{3}-[0-9]{2}"),
        Form(choice=["red", "green"]),
        Form(grammar='root ::= "x" [0-9]+ "y"'),
        Form(json={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
        Form(json_object=True),
    ]
    answers: dict[str, list[list[int]]] = {}
    for name in ("auto", "xgrammar", "outlines"):
        with engine("quire-tiny", structured_outputs_config={"backend": name}) as one:
            front = RequestManager(one.client)
            children = [
                front.accept(
                    "Tell", SamplingParams(structured_outputs=form, max_tokens=20, seed=3), id="x"
                ).children[0]
                for form in forms
            ]
            runs = one.run([child.tokens for child in children], [child.params for child in children])  # fmt: skip
            answers[name] = [[token for out in outputs for token in out.tokens] for outputs in runs]
    assert all(answers["auto"])
    assert answers["xgrammar"] == answers["outlines"] == answers["auto"]
