"""Dashboard and alerts ask for metrics that there are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml
from asgi import ask
from scripted import ScriptedEngine, make_state

DEPLOY = Path(__file__).parents[2] / "deploy"
METRIC = re.compile(r"\b(?:vllm:|quire:|http_|process_)\w+")
LABEL = re.compile(r"(\w+)\s*(?:=~|!=|=)\s*\"")


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DEPLOY / "grafana/quire.json").read_text())
    return found


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def queries() -> list[str]:
    asked = [target["expr"] for panel in panels() for target in panel["targets"]]
    return asked + [rule["expr"] for rule in rules()]


def samples() -> dict[str, set[str]]:
    """Names of all samples after some load, each with its labels."""
    state = make_state(ScriptedEngine("a"))
    for prompt in ("a", ""):
        ask(None, "POST", "/v1/completions", {"prompt": prompt}, state=state)
    found: dict[str, set[str]] = {}
    for line in ask(None, "GET", "/metrics", state=state).text.splitlines():
        if not line.startswith("#"):
            name, _, labels = line.partition("{")
            found.setdefault(name.split(" ")[0], set()).update(re.findall(r'(\w+)="', labels))
    return found


def test_every_queried_metric_exists_with_its_labels():
    known = samples()
    for query in queries():
        names = METRIC.findall(query)
        assert names or query.startswith("up{"), query
        for name in names:
            assert name in known, f"{name} in {query}"
            for inside in re.findall(re.escape(name) + r"\{([^}]*)\}", query):
                assert set(LABEL.findall(inside)) <= known[name], query
        for grouped in re.findall(r"by \(([^)]*)\)", query):
            wanted = {label.strip() for label in grouped.split(",")}
            assert any(wanted <= known[name] for name in names), query


def test_a_missing_metric_is_detected():
    assert "vllm:no_such_metric" not in samples()
    assert METRIC.findall('rate(vllm:no_such_metric{a="b"}[5m])') == ["vllm:no_such_metric"]


def test_the_dashboard_has_its_four_rows_and_no_panel_on_another():
    everything = dashboard()["panels"]
    assert [panel["title"] for panel in everything if panel["type"] == "row"] == [
        "Tokens a second", "Latency", "KV cache", "Requests",
    ]  # fmt: skip
    assert len({panel["id"] for panel in everything}) == len(everything)
    taken: set[tuple[int, int]] = set()
    for panel in everything:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken
        taken |= cells


def test_alerts_name_the_remedy():
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)
    assert all(rule["annotations"]["summary"].endswith(".") and rule["for"] for rule in rules())
    scrape = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    assert scrape["rule_files"] == ["alerts.yml", "rules.yml"]
    assert [job["job_name"] for job in scrape["scrape_configs"]] == ["quire"]


def test_each_counter_has_its_bare_name():
    groups = yaml.safe_load((DEPLOY / "prometheus/rules.yml").read_text())["groups"]
    told = ask(None, "GET", "/metrics", state=make_state(ScriptedEngine("a"))).text
    counters = re.findall(r"# TYPE (vllm:\w+)_total counter", told)
    assert counters
    assert [rule for group in groups for rule in group["rules"]] == [
        {"record": name, "expr": f"{name}_total"} for name in counters
    ]


def test_flags_that_alerts_name_exist():
    from quire.config.options import options

    flags = {f"--{name.replace('_', '-')}" for name in options()}
    for rule in rules():
        assert set(re.findall(r"--[a-z-]+", rule["annotations"]["summary"])) <= flags
