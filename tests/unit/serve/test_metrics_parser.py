"""What a server tells Prometheus: wanted lines are found whatever stands beside them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from equipoise.serve.worker_reports import InvalidMetrics, MetricsParser, Sample

LABELS = st.dictionaries(st.sampled_from("abc"), st.text(max_size=8), min_size=3, max_size=3)


@given(rows=st.lists(st.tuples(LABELS, st.floats(0, 1e12)), max_size=6))
def test_exposition_reader_reads_prometheus_client_output(
    rows: list[tuple[dict[str, str], float]],
) -> None:
    registry = CollectorRegistry()
    gauge = Gauge("running", "some words", ["a", "b", "c"], registry=registry)
    Gauge("running_more", "running 7", registry=registry).set(3)
    for labels, value in rows:
        gauge.labels(**labels).set(value)
    page = generate_latest(registry).decode()
    samples = list(MetricsParser(["running"]).parse(page))
    expected = {tuple(sorted(labels.items())): value for labels, value in rows}
    assert [one.value for one in samples] == pytest.approx(list(expected.values()))


def test_exposition_reader_separates_names_with_same_prefix() -> None:
    page = '# TYPE r gauge\nr 1\nr:x{rank="0",m="}\\"{"} 2 1700000\nr_total 9\n r 5\nrr 6\n'
    assert list(MetricsParser(["r", "r:x"]).parse(page)) == [
        Sample("r", {}, 1.0),
        Sample("r:x", {"rank": "0", "m": '}\\"{'}, 2.0),
    ]


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-1", "many"])
def test_exposition_reader_rejects_invalid_value_by_name(value: str) -> None:
    with pytest.raises(InvalidMetrics, match="r is "):
        list(MetricsParser(["r"]).parse(f"r {value}\n"))


@given(page=st.text())
def test_exposition_reader_reads_or_rejects_any_text(page: str) -> None:
    try:
        samples = list(MetricsParser(["a", "b"]).parse(page))
    except InvalidMetrics:
        return
    assert all(one.value >= 0 for one in samples)
