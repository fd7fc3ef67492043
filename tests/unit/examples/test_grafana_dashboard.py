"""The example of a dashboard asks for nothing that nobody tells."""

import json
import re
from typing import Any

import pytest
from helpers.paths import ROOT

from equipoise.balancer.observe.metrics import PrometheusSink

prometheus_client = pytest.importorskip("prometheus_client")
BOARD = ROOT / "examples" / "grafana" / "equipoise-vllm.json"
SERIES = r"(equipoise_\w+)(?:\{([^}]*)\})?"
"""A name, and what it is selected by."""


def board() -> Any:
    return json.loads(BOARD.read_text(encoding="utf-8"))


def panels() -> list[dict[str, Any]]:
    dashboard_panels: list[dict[str, Any]] = board()["panels"]
    return dashboard_panels


def targets() -> list[dict[str, str]]:
    return [target for panel in panels() for target in panel["targets"]]


def labels_by_series() -> dict[str, set[str]]:
    """Labels of all series of an engine, by name: `_total` of counters, `_bucket` of histograms."""
    registry = prometheus_client.CollectorRegistry()
    PrometheusSink(registry, "x")
    samples = [sample for family in registry.collect() for sample in family.samples]
    return {sample.name: set(sample.labels) for sample in samples}


def labels(selector: str) -> set[str]:
    """Label names in `a, b`, or in `a="x", b=~"y"`."""
    return set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=|,|$)", re.sub(r'"[^"]*"', "", selector)))


def test_dashboard_queries_only_exported_series() -> None:
    queried_names = {name for target in targets() for name, _ in re.findall(SERIES, target["expr"])}
    assert len(queried_names) >= 8
    assert queried_names <= labels_by_series().keys()


@pytest.mark.parametrize("target", targets(), ids=lambda one: one["expr"])
def test_dashboard_queries_use_existing_labels(target: dict[str, str]) -> None:
    series_labels, expression = labels_by_series(), target["expr"]
    by = [labels(one) for one in re.findall(r"\bby \(([^)]*)\)", expression)]
    assert by, "ranks are put together"
    for name, selector in re.findall(SERIES, expression):
        assert "engine" in labels(selector) <= series_labels[name]
        assert set.union(*by) <= series_labels[name]
        assert ("le" in by[0]) == name.endswith("_bucket")
    assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= set.intersection(*by)


def test_dashboard_variables_query_existing_labels() -> None:
    queries = [one["query"] for one in board()["templating"]["list"] if one["type"] == "query"]
    assert queries
    for query in queries:
        [(name, label)] = re.findall(r"^label_values\((\w+), (\w+)\)$", query)
        assert label in labels_by_series()[name]


def test_dashboard_panels_have_own_places_and_descriptions() -> None:
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels()]
    assert len(set(places)) == len(places)
    assert all(panel["description"].endswith(".") for panel in panels())
