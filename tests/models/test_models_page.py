"""docs/models.md and docs/choose-a-model.md list exactly the registered and tested models."""

from __future__ import annotations

from tests.models.archs import ARCHS
from tools.generated_tables import filled
from tools.list_models import CHOICE, CHOICES, PAGE, TABLES


def test_the_page_equals_the_tools_output():
    page = PAGE.read_text(encoding="utf-8")
    assert filled(page, TABLES) == page, "run: python -m tools.list_models"


def test_the_choice_by_memory_equals_the_tools_output():
    page = CHOICE.read_text(encoding="utf-8")
    assert filled(page, CHOICES) == page, "run: python -m tools.list_models"


def test_a_changed_table_is_detected():
    page = PAGE.read_text(encoding="utf-8")
    stale = page.replace("| `qwen3_moe` | `Qwen3MoeForCausalLM` | 1 |\n", "")
    assert stale != page
    assert filled(stale, TABLES) == page


def test_as_many_architectures_as_promised():
    assert len({arch.kind for arch in ARCHS}) >= 60
