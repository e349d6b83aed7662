"""Every source file keeps every rule of source_rules.py."""

from __future__ import annotations

import pytest
from source_rules import RULES, Rule, source_files

FILES = source_files()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_holds_in_every_file(rule: Rule):
    wrong = [line for file in FILES for line in rule(file)]
    assert not wrong, "\n" + "\n".join(wrong)


def test_there_are_files():
    assert len(FILES) > 40
