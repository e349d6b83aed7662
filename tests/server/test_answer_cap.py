"""From requests to SamplingParams: the cap of a model on answers."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

import quire
from quire.frontend.generation_config import GenerationDefaults

EMBEDDED = Path(quire.__file__).parent / "embedded"


def test_a_cap_of_the_model_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    defaults = GenerationDefaults({"max_tokens": 83})
    with caplog.at_level(logging.WARNING, logger="quire"):
        assert (defaults.max_tokens(None), defaults.max_tokens(83)) == (83, 83)
        assert not caplog.records
        assert [defaults.max_tokens(asked) for asked in (84, 700)] == [83, 83]
    (record,) = caplog.records
    assert "limits outputs to 83 tokens" in record.getMessage()
    assert "--generation-config vllm" in record.getMessage()


@pytest.mark.parametrize("name", ["quire-tiny", "quire-tiny-draft"])
def test_embedded_models_cap_no_answer(name: str) -> None:
    """(Requests for 700 tokens got 256.)"""
    found = json.loads((EMBEDDED / name / "generation_config.json").read_text())
    assert "max_new_tokens" not in found
