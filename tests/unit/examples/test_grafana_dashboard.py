"""The examples of dashboards ask for nothing that nobody tells."""

import json
import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from helpers.paths import ROOT

from equipoise.balancer.observe.metrics import PrometheusSink
from equipoise.balancer.requests.policy import WorkerState
from equipoise.serve.metrics import ProxyMetrics
from equipoise.serve.outcomes import RequestOutcome
from equipoise.serve.picker.metrics import PickerMetrics

prometheus_client = pytest.importorskip("prometheus_client")
parser = pytest.importorskip("prometheus_client.parser")
FOLDER = ROOT / "examples" / "grafana"
ENGINE, FRONT_ENDS = FOLDER / "equipoise-vllm.json", FOLDER / "equipoise-front-ends.json"
BOARDS = sorted(FOLDER.glob("*.json"))
SERIES = r"(equipoise_\w+)(?:\{([^}]*)\})?"
"""A name, and what it is selected by."""
OF_TARGETS = {"instance", "job"}
"""Labels that Prometheus adds to every series."""


def board(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def panels(path: Path) -> list[dict[str, Any]]:
    """Those with figures."""
    return [panel for panel in board(path)["panels"] if panel["type"] != "row"]


def targets() -> list[Any]:
    """Of all boards, with the board of each."""
    return [
        pytest.param(path, target, id=f"{path.stem}: {target['expr']}")
        for path in BOARDS
        for panel in panels(path)
        for target in panel["targets"]
    ]


@cache
def labels_by_series(path: Path) -> dict[str, set[str]]:
    """Labels of all series by name: `_total` of counters, `_bucket` of histograms."""
    texts = [engine_metrics()] if path == ENGINE else [proxy_metrics(), picker_metrics()]
    return {
        sample.name: set(sample.labels)
        for text in texts
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }


def engine_metrics() -> str:
    registry = prometheus_client.CollectorRegistry()
    PrometheusSink(registry, "x")
    return str(prometheus_client.generate_latest(registry).decode())


def dispatcher() -> Any:
    """With one worker, and nothing to do."""
    worker = SimpleNamespace(requests={}, load=0, report_failures=0, state=WorkerState.SERVING)
    return SimpleNamespace(workers=[worker], requests={}, queued=0, policy=None, policy_errors=0)


def proxy_metrics() -> str:
    metrics, stalls = ProxyMetrics(["rank 0"]), SimpleNamespace(seconds=0.0)
    metrics.watch(dispatcher(), cast(Any, stalls), lambda: 0)
    return metrics.exposition().decode()


def picker_metrics() -> str:
    metrics, seen = PickerMetrics(), dispatcher()
    metrics.request_ended(RequestOutcome.COMPLETED, 0.1)
    endpoint = SimpleNamespace(settings=SimpleNamespace(name="pod"), number=0)
    pool: Any = SimpleNamespace(
        dispatcher=seen, serving=1, endpoints=(endpoint,), view=lambda _: seen.workers[0]
    )
    metrics.watch(pool)
    return metrics.exposition().decode()


def labels(selector: str) -> set[str]:
    """Label names in `a, b`, or in `a="x", b=~"y"`."""
    return set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=|,|$)", re.sub(r'"[^"]*"', "", selector)))


@pytest.mark.parametrize(("path", "least"), [(ENGINE, 8), (FRONT_ENDS, 24)])
def test_dashboard_queries_only_exported_series(path: Path, least: int) -> None:
    queries = [target["expr"] for panel in panels(path) for target in panel["targets"]]
    queried_names = {name for query in queries for name, _ in re.findall(SERIES, query)}
    assert len(queried_names) >= least
    assert queried_names <= labels_by_series(path).keys()


@pytest.mark.parametrize(("path", "target"), targets())
def test_dashboard_queries_use_existing_labels(path: Path, target: dict[str, str]) -> None:
    series_labels, expression = labels_by_series(path), target["expr"]
    by = [labels(one) for one in re.findall(r"\bby \(([^)]*)\)", expression)]
    assert by, "ranks, or front ends, are put together"
    for name, selector in re.findall(SERIES, expression):
        known = series_labels[name] | OF_TARGETS
        assert ("engine" if path == ENGINE else "instance") in labels(selector) <= known
        assert set.union(*by) <= known
        assert ("le" in by[0]) == name.endswith("_bucket")
    assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= set.intersection(*by)


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_dashboard_variables_query_existing_labels(path: Path) -> None:
    listed = board(path)["templating"]["list"]
    queries = [one["query"] for one in listed if one["type"] == "query"]
    assert queries
    for query in queries:
        [(name, label)] = re.findall(r"^label_values\((\w+), (\w+)\)$", query)
        assert label in labels_by_series(path)[name] | OF_TARGETS
    known = {one["name"] for one in listed}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(board(path)["panels"]))) <= known


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_dashboard_panels_have_own_places_and_descriptions(path: Path) -> None:
    shown = board(path)["panels"]
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in shown]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in shown}) == len(shown)
    assert all(panel["description"].endswith(".") for panel in panels(path))


def test_dashboards_have_own_names() -> None:
    assert set(BOARDS) == {ENGINE, FRONT_ENDS}
    assert len({board(path)["uid"] for path in BOARDS}) == len(BOARDS)
