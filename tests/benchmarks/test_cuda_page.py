"""What the page says of NVIDIA's devices is what was measured there: OWED, met or missed."""

import copy
import json
import runpy
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
Figures = dict[str, Any]
Module = dict[str, Any]
Change = Callable[[Figures], None]


def around(median: float) -> Figures:
    return {"median": median, "lowest": median * 0.9, "highest": median * 1.1}


def routing(tokens: int) -> Figures:
    return {
        "tokens": tokens,
        "microseconds": {name: around(3.0) for name in ("ours", "torch", "hash and count")},
        "ratio": around(1.02),
        "above": around(0.5),
    }


def copied(way: str, mebibytes: int) -> Figures:
    return {
        "way": way,
        "asked_bytes": mebibytes << 20,
        "slot_bytes": mebibytes << 20,
        "gigabytes_per_second": around(52.0),
        "ceiling": around(54.0),
        "part": around(0.96 if mebibytes >= 8 else 0.5),
        "host_microseconds": 80.0,
    }


def step(dtype: str, path: str, mode: str) -> Figures:
    both = {"with": around(5.6), "without": around(5.5)}
    return {
        "dtype": dtype,
        "path": path,
        "mode": mode,
        "experts": "one batched product a matrix",
        "median": both,
        "p99": both,
        "median_ratio": around(1.01),
        "p99_ratio": around(1.04 if mode == "captured" else 1.4),
        "share": 0.008,
        "peak_share": 0.0099,
        "inside": 0.8,
        "epochs": 70,
        "least_ms": 5.2,
    }


WAYS = "host to device", "staging to slot", "slot to slot"
DEVICE = {
    "device": "a device, 139 GiB",
    "driver": "570.1",
    "runtime": "12.9",
    "torch": "2.11",
    "triton": "3.6",
}
MEASURED: Figures = {
    "device": DEVICE,
    "kernels": {
        "routing": [routing(tokens) for tokens in (1, 64, 4096, 16384)],
        "others": [
            {"what": "count", "of": "64 tokens", "microseconds": around(2.0)},
            {
                "what": "checksum",
                "of": "64 MiB",
                "microseconds": around(40.0),
                "gigabytes_per_second": around(1700.0),
            },
        ],
        "shares": {"microseconds": around(40.0), "gap": around(0.004)},
    },
    "copies": {
        "batch": 8,
        "rows": [copied(way, size) for size in (1, 8, 64) for way in WAYS],
    },
    "decode": {
        "pairs": 5,
        "left_out": [],
        "rows": [
            step(dtype, path, mode)
            for dtype in ("bfloat16", "float8")
            for path in ("boundary", "locked")
            for mode in ("captured", "launched one by one")
        ],
    },
    "vllm": {"said": "vLLM 0.33", "same": True, "rows": [{"tokens": 64}]},
}
SUITE: Figures = {"ended": {"passed": 60}, "reasons": [], "seconds": 90, "exit_code": 0}
SEEN: Figures = {
    "device": DEVICE,
    "conformance": {"ended": {"held": 70}, "seconds": 120.0, "exit_code": 0},
    "faults": SUITE,
    "channels": {**SUITE, "ended": {"passed": 9, "skipped": 1}, "reasons": ["two ranks a device"]},
}
MACHINE = dict.fromkeys(("processor", "cores", "memory", "python", "torch", "numpy"), "x")


@pytest.fixture
def performance(monkeypatch: pytest.MonkeyPatch) -> Module:
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    return runpy.run_path(str(BENCHMARKS / "performance.py"))


@pytest.fixture
def page_of(
    performance: Module, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[[Figures | None, Figures | None], str]:
    """The section of a page whose files of results are these."""

    def page(measured: Figures | None, seen: Figures | None) -> str:
        for name, figures in (("cuda", measured), ("cuda_deep", seen)):
            found = {"command": f"{name}.py", "commit": "c", "machine": MACHINE, "figures": figures}
            if figures is not None:
                (tmp_path / f"{name}.json").write_text(json.dumps(found))
        monkeypatch.setitem(performance["_load"].__globals__, "RESULTS", tmp_path)
        return str(performance["page"]()).partition("## CUDA")[2]

    return page


def rows(page: str) -> Iterator[list[str]]:
    """The cells of the table of bars."""
    table = page.partition("| Figure | Bar | Measured |")[2].partition("\n\n")[0]
    for line in table.splitlines()[2:]:
        yield [cell.strip() for cell in line.strip("|").split("|")]


def verdict(page: str, what: str) -> tuple[str, str]:
    found = [row for row in rows(page) if row[0].startswith(what)]
    assert len(found) == 1, what
    return found[0][2], found[0][3]


def test_without_results_every_figure_is_owed_with_its_bar_and_its_command(
    page_of: Callable[..., str],
) -> None:
    found = list(rows(page_of(None, None)))
    assert len(found) == 22
    for what, asked, measured, met, command in found:
        assert (measured, met) == ("OWED", "OWED"), what
        assert asked
        assert command.startswith("`python benchmarks/cuda")


def test_with_results_nothing_is_owed_and_everything_says_whether_it_is_met(
    page_of: Callable[..., str],
) -> None:
    page = page_of(MEASURED, SEEN)
    assert "OWED" not in page
    assert [row[0] for row in rows(page) if row[3] != "yes"] == ["device, driver, versions"]
    assert verdict(page, "device")[0] == (
        "a device, 139 GiB, driver 570.1, CUDA 12.9, torch 2.11, Triton 3.6"
    )
    assert page.count("On a device, 139 GiB, driver 570.1") == 2
    assert "`cuda.py` at commit c" in page


@pytest.mark.parametrize(
    ("part", "left"),
    [("kernels", 4), ("copies", 3), ("decode", 10), ("vllm", 1), ("conformance", 1), ("faults", 1)],
)
def test_the_lines_of_a_part_are_owed_until_it_was_measured(
    page_of: Callable[..., str], performance: Module, part: str, left: int
) -> None:
    measured = {name: found for name, found in MEASURED.items() if name != part}
    seen = {name: found for name, found in SEEN.items() if name != part}
    lines = performance["cuda_page"].table({"cuda": measured, "cuda_deep": seen})
    assert sum("| OWED | OWED |" in line for line in lines) == left


def _ratio(figures: Figures) -> None:
    figures["kernels"]["routing"][2]["ratio"]["median"] = 1.11


def _above(figures: Figures) -> None:
    figures["kernels"]["routing"][1]["above"]["median"] = 1.01


def _shares(figures: Figures) -> None:
    figures["kernels"]["shares"]["microseconds"]["median"] = 60.1


def _gap(figures: Figures) -> None:
    figures["kernels"]["shares"]["gap"]["highest"] = 0.011


def _copies(figures: Figures) -> None:
    figures["copies"]["rows"][-1]["part"]["median"] = 0.89


def _median(figures: Figures) -> None:
    figures["decode"]["rows"][0]["median_ratio"]["median"] = 1.051


def _p99(figures: Figures) -> None:
    figures["decode"]["rows"][6]["p99_ratio"]["median"] = 1.051


def _moved(figures: Figures) -> None:
    figures["decode"]["rows"][1]["peak_share"] = 0.0101


def _short(figures: Figures) -> None:
    figures["decode"]["rows"][1]["least_ms"] = 4.99


def _pairs(figures: Figures) -> None:
    figures["decode"]["pairs"] = 4


def _different(figures: Figures) -> None:
    figures["vllm"]["same"] = False


def _nan(figures: Figures) -> None:
    figures["kernels"]["shares"]["microseconds"]["median"] = float("nan")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (_ratio, "routing and counting over"),
        (_above, "the same below"),
        (_shares, "exact shares"),
        (_gap, "their imbalance"),
        (_copies, "copies, slots to slots"),
        (_median, "decode step with an epoch over without, bfloat16, boundary, captured: median"),
        (_p99, "decode step with an epoch over without, float8, locked, captured: P99"),
        (_moved, "the epoch's part"),
        (_short, "decode steps"),
        (_pairs, "decode steps"),
        (_different, "the baseline"),
        (_nan, "exact shares"),
    ],
)
def test_a_bar_that_is_missed_is_shown_as_missed_and_no_other_is(
    page_of: Callable[..., str], change: Change, what: str
) -> None:
    measured = copy.deepcopy(MEASURED)
    change(measured)
    page = page_of(measured, SEEN)
    assert verdict(page, what)[1] == "**no**"
    assert [row[3] for row in rows(page)].count("**no**") == 1


@pytest.mark.parametrize(
    ("name", "suite", "met"),
    [
        ("the engine's", {"ended": {"passed": 59, "failed": 1}, "exit_code": 1}, "**no**"),
        ("the engine's", {"ended": {}, "exit_code": 4}, "**no**"),
        ("the engine's", {"ended": {"skipped": 60}, "exit_code": 0}, "not judged"),
        ("conformance", {"ended": {"held": 60, "violated": 1}, "exit_code": 1}, "**no**"),
    ],
)
def test_what_was_run_deep_is_told_as_it_ended(
    page_of: Callable[..., str], name: str, suite: Figures, met: str
) -> None:
    key = "conformance" if name == "conformance" else "faults"
    page = page_of(MEASURED, {**SEEN, key: {**SEEN[key], **suite}})
    assert verdict(page, name)[1] == met


def test_a_kernel_that_could_not_be_checked_is_not_judged(page_of: Callable[..., str]) -> None:
    page = page_of({**MEASURED, "vllm": {"said": "vLLM is not installed", "same": None}}, SEEN)
    assert verdict(page, "the baseline") == ("vLLM is not installed", "not judged")


def test_without_the_baseline_its_two_lines_stay_owed(page_of: Callable[..., str]) -> None:
    measured = copy.deepcopy(MEASURED)
    for row in measured["kernels"]["routing"]:
        del row["ratio"], row["above"], row["microseconds"]["hash and count"]
    page = page_of(measured, SEEN)
    owed = [row[0] for row in rows(page) if row[3] == "OWED"]
    assert [what[:16] for what in owed] == ["routing and coun", "the same below 4"]


class TestDeep:
    @pytest.fixture
    def deep(self, monkeypatch: pytest.MonkeyPatch) -> Module:
        monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
        return runpy.run_path(str(BENCHMARKS / "cuda_deep.py"))

    def test_without_a_device_it_ends_with_2(
        self, deep: Module, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(deep["main"].__globals__, "missing", lambda name: "no device")
        assert deep["main"]([]) == 2
        assert capsys.readouterr().err == "cuda_deep.py cannot run here: no device\n"

    def test_a_suite_that_there_is_not_is_refused(
        self, deep: Module, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as ended:
            deep["main"](["fault"])
        assert ended.value.code == 2
        assert "unknown: fault; known: conformance, faults, channels" in capsys.readouterr().err

    def test_tests_are_told_by_how_they_ended(self, deep: Module) -> None:
        text = """<testsuites><testsuite>
          <testcase name="a" time="1.5"/>
          <testcase name="b" time="2"><failure message="no"/></testcase>
          <testcase name="c" time="0"><skipped message="one device"/></testcase>
          <testcase name="d" time="0.1"><skipped message="one device"/></testcase>
        </testsuite></testsuites>"""
        assert deep["told"](ElementTree.fromstring(text)) == {
            "ended": {"passed": 1, "failed": 1, "skipped": 2},
            "failed": ["b"],
            "reasons": ["one device"],
            "seconds": 4,
        }

    def test_what_was_asked_for_is_kept_beside_what_was_seen_before(
        self, deep: Module, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kept: list[Figures] = []
        cpu = deep["opened"]("cpu")
        for name, found in (
            ("missing", lambda name: None),
            ("opened", lambda name: cpu),
            ("known", lambda: {"channels": SUITE}),
            ("commit", lambda: "c"),
            ("save", lambda name, command, figures: kept.append(figures)),
            ("SUITES", {"faults": lambda folder: {**SUITE, "exit_code": 1}}),
        ):
            monkeypatch.setitem(deep["main"].__globals__, name, found)
        assert deep["main"](["faults"]) == 1
        assert kept[0]["faults"]["commit"] == "c"
        assert kept[0]["channels"] == SUITE
