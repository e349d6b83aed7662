"""Which warnings are errors in a test (`filterwarnings` in pyproject.toml): what this repository causes, not what others say."""

from __future__ import annotations

import warnings

import pytest


def warned(module: str, category: type[Warning]) -> str:
    """ "error" or "shown": what the filters of this test run do with a warning that `module` gets."""
    try:
        with warnings.catch_warnings(record=True):
            warnings.warn_explicit("said once", category, f"{module}.py", 1, module)
    except category:
        return "error"
    return "shown"


@pytest.mark.parametrize(
    ("module", "category", "outcome"),
    [
        ("transformers.models.llama.modeling_llama", FutureWarning, "shown"),
        ("torch.nn.modules.module", UserWarning, "shown"),
        ("quirette", UserWarning, "shown"),
        # A package with an old name names the caller: it is the package's warning.
        ("quire.models.transformers.model", FutureWarning, "shown"),
        ("quire.models.transformers.model", DeprecationWarning, "shown"),
        ("quire", UserWarning, "error"),
        ("quire.models.transformers.model", RuntimeWarning, "error"),
        ("benchmarks.serving", UserWarning, "error"),
        ("tests.models.harness", UserWarning, "error"),
        (__name__, UserWarning, "error"),
        ("asyncio.selector_events", ResourceWarning, "error"),
        ("_pytest.mark.structures", pytest.PytestRemovedIn10Warning, "shown"),
        ("_pytest.unraisableexception", pytest.PytestUnraisableExceptionWarning, "error"),
    ],
)
def test_a_warning_is_an_error_where_this_repository_causes_it(module, category, outcome) -> None:
    assert warned(module, category) == outcome
