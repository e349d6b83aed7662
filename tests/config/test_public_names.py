"""What `import quire` offers: every promised name, none of it loaded before it is used."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import quire
from quire.errors import Unsupported

NOW = """
LLM AsyncLLM AsyncLLMEngine LLMEngine SamplingParams BeamSearchParams StructuredOutputsParams RequestOutputKind RequestOutput
CompletionOutput BeamSearchOutput BeamSearchSequence Logprob EngineArgs AsyncEngineArgs ModelRegistry install_as_vllm TextPrompt
TokensPrompt EmbedsPrompt PromptType LoRARequest
PoolingParams PoolingOutput PoolingRequestOutput EmbeddingOutput EmbeddingRequestOutput ClassificationOutput
ClassificationRequestOutput ScoringOutput ScoringRequestOutput
"""


def test_the_list_is_complete():
    agreed = {"__version__", "__version_tuple__", "initialize_ray_cluster", *NOW.split()}
    assert set(quire.__all__) == agreed
    assert set(dir(quire)) == agreed
    assert quire.__version_tuple__ == tuple(int(n) for n in quire.__version__.split("."))


@pytest.mark.parametrize("name", NOW.split())
def test_public_names_exist(name):
    found = getattr(quire, name)
    assert getattr(quire, name) is found
    if name not in ("PromptType", "ModelRegistry", "AsyncLLMEngine"):
        assert found.__name__ == name
        assert found.__doc__


def test_an_unsupported_feature_can_be_imported_and_raises_when_used():
    name = "KVEventsConfig"
    later = getattr(importlib.import_module("quire.compat.vllm_unsupported"), name)
    assert isinstance(later, type)
    assert not isinstance("x", later)
    with pytest.raises(Unsupported, match=rf"{name} .* is not supported yet: let each server"):
        later(1, dimensions=3)
    assert not hasattr(later, "from_optional")


def test_ray_is_started_by_the_engine():
    with pytest.raises(Unsupported, match=r"starting Ray by hand.*distributed_executor_backend"):
        quire.initialize_ray_cluster()


def test_another_name_is_an_error():
    with pytest.raises(AttributeError, match="module 'quire' has no attribute 'Nonsense'"):
        _ = quire.Nonsense


def test_importing_is_cheap():
    code = (
        "import sys, quire; quire.SamplingParams(); quire.EngineArgs;"
        "print([m for m in ('torch', 'transformers', 'zmq', 'numpy', 'starlette') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.stdout.strip() == "[]", done.stderr
