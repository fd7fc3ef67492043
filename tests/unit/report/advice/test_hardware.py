"""Hardware profiles: those that ship, and files of one's own."""

import re
from pathlib import Path

import pytest
from helpers.paths import ROOT
from hypothesis import given
from hypothesis import strategies as st

from equipoise.hal.errors import FormatError
from equipoise.report.advice.hardware import KEYS, Hardware, find_hardware, shipped_hardware


def test_shipped_hardware_figures_have_sources() -> None:
    assert len(shipped_hardware()) >= 3
    for hardware in shipped_hardware().values():
        assert set(hardware.figures) == set(hardware.sources)
        assert all(hardware.sources.values())
        assert {"memory_gb", "memory_bandwidth_gbs", "bf16_tflops"} <= set(hardware.figures)


def test_advise_docs_list_every_hardware_figure() -> None:
    page = (ROOT / "docs" / "advise.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if re.match(r"\| [a-z0-9-]+ \| `[a-z0-9_]+` ", line)]
    assert rows == [
        f"| {name} | `{key}` | {value:g} | {hardware.sources[key]} |"
        for name, hardware in shipped_hardware().items()
        for key, value in hardware.figures.items()
    ]


def test_hardware_file_accepts_values_with_or_without_sources(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("memory_gb: 10\nfp8_tflops: {value: 2.5, source: I measured it}\n")
    hardware = find_hardware(str(path))
    assert (hardware.name, hardware.memory_bytes) == ("mine", 10**10)
    assert hardware.operations_per_second("fp8") == 2.5e12
    assert hardware.sources == {"memory_gb": str(path), "fp8_tflops": "I measured it"}
    path.write_text('{"name": "other", "host_link_gbs": 64}')
    assert find_hardware(str(path)).name == "other"
    assert find_hardware(str(path)).link_bytes_per_second("host") == 64e9


BAD = {
    "": "is not a mapping of figures",
    "[1]": "is not a mapping of figures",
    "{": "is neither YAML nor JSON",
    "memory_gb: 2001-99-99": "is neither YAML nor JSON",
    "memory: 1": "unknown key 'memory'; known: name, memory_gb",
    "memory_gb: 0": "memory_gb must be a positive number to 1e+09, got 0",
    "memory_gb: -1": "got -1",
    "memory_gb: true": "got True",
    "memory_gb: .nan": "got nan",
    "memory_gb: .inf": "got inf",
    "memory_gb: many": "got 'many'",
    "memory_gb: {source: none}": "got nan",
    "memory_gb: 1e10": "got ",
}


@pytest.mark.parametrize(("text", "message"), BAD.items())
def test_hardware_file_error_names_file(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(FormatError) as error:
        find_hardware(str(path))
    assert str(error.value).startswith(str(path))
    assert message in str(error.value)


def test_hardware_find_rejects_unknown_or_unreadable_names(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="abacus: is neither a file nor one of h100"):
        find_hardware("abacus")
    with pytest.raises(FormatError, match="cannot be read: Is a directory"):
        find_hardware(str(tmp_path))
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FormatError, match="is neither YAML nor JSON"):
        find_hardware(str(tmp_path / "bytes"))


def test_hardware_missing_figure_is_named() -> None:
    with pytest.raises(FormatError, match="mine: has no fp4_tflops; it has memory_gb"):
        Hardware("mine", {"memory_gb": 1.0}).operations_per_second("fp4")
    with pytest.raises(FormatError, match="910c: has no fp8_tflops: --precision bf16 has a figure"):
        find_hardware("ascend-910c").operations_per_second("fp8")


@given(st.sampled_from(KEYS), st.floats(1e-6, 1e9))
def test_hardware_figure_returns_given_value(key: str, value: float) -> None:
    assert Hardware("mine", {key: value}).figure(key) == value
