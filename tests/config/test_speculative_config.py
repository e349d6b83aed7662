"""speculative_config: every form of it, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from quire.config.from_keywords import engine_config
from quire.config.speculation import speculative_options
from quire.config.validate import check_options
from quire.errors import ConfigError, Unsupported

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}


def options(**keywords: Any) -> Any:
    config = engine_config({"model": "m", **keywords})
    return speculative_options(config.speculation.speculative_config)


@pytest.mark.parametrize(
    "keywords",
    [
        {"speculative_config": NGRAM},
        {"speculative_config": '{"method": "ngram", "num-speculative-tokens": "4"}'},
        {"speculative_config": {"model": "[ngram]", "num_speculative_tokens": 4}},
        {"speculative_config": {"num_speculative_tokens": 4}},
        {"spec_method": "ngram", "spec_tokens": 4},
        {"speculative_config": {"method": "ngram"}, "spec_tokens": 4},
        {"speculative_model": "[ngram]", "num_speculative_tokens": 4},
        {"speculative_config": {**NGRAM, "draft_sample_method": "greedy"}},
    ],
)
def test_every_form_means_the_same(keywords: dict[str, Any]) -> None:
    found = options(**keywords)
    assert (found.method, found.num_speculative_tokens, found.adaptive) == ("ngram", 4, True)
    assert (found.prompt_lookup_min, found.prompt_lookup_max) == (5, 5)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"prompt_lookup_max": 4, "prompt_lookup_min": 2}, (2, 4)),
        ({"prompt_lookup_max": 3}, (3, 3)),
        ({"prompt_lookup_min": 7}, (7, 7)),
    ],
)
def test_lookup_lengths(keys: dict[str, int], expected: tuple[int, int]) -> None:
    found = options(speculative_config={**NGRAM, **keys})
    assert (found.prompt_lookup_min, found.prompt_lookup_max) == expected
    old = options(
        speculative_model="ngram", num_speculative_tokens=4,
        **{f"ngram_{key}": value for key, value in keys.items()},
    )  # fmt: skip
    assert old == found


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        ({"num_speculative_tokens": None}, "num_speculative_tokens is missing"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens=0: must be 1 to 128"),
        ({"num_speculative_tokens": 129}, "must be 1 to 128"),
        ({"num_speculative_tokens": "many"}, "speculative_config"),
        ({"prompt_lookup_min": 4, "prompt_lookup_max": 3}, "prompt_lookup_min=4"),
        ({"prompt_lookup_min": 0, "prompt_lookup_max": 3}, "prompt_lookup_min=0"),
        ({"method": "guess"}, "method='guess': choose from ngram"),
        ({"lookup": 1}, "speculative_config.lookup: unknown key"),
    ],
)
def test_what_is_wrong_is_named(keys: dict[str, Any], names: str) -> None:
    given = {**NGRAM, **keys}
    with pytest.raises(ConfigError, match=names):
        check_options(engine_config({"model": "m", "speculative_config": given}))


@pytest.mark.parametrize(
    "given", [{"model": "some/draft", "num_speculative_tokens": 3}, {"method": "eagle3"}]
)
def test_drafters_with_a_model_are_not_supported_yet(given: dict[str, Any]) -> None:
    with pytest.raises(Unsupported, match="use one of ngram"):
        options(speculative_config=given)
