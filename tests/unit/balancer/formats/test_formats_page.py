"""docs/formats.md has every format that is known, and its example holds."""

import re
from pathlib import Path

import numpy as np
import pytest
from helpers.paths import ROOT
from safetensors.numpy import save_file

from equipoise.balancer.formats.format_names import TRACE_FORMAT_NAMES
from equipoise.balancer.formats.registry import PLACEMENT_FORMATS, STATISTICS_FORMATS
from equipoise.balancer.formats.trace_reading import TRACE_FORMATS

PAGE = ROOT / "docs" / "formats.md"
ROW = re.compile(r"^\| `([a-z-]+)` \|(.*)\|$", re.MULTILINE)


def sections() -> list[str]:
    """The parts about statistics and about placements."""
    return re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:3]


def test_formats_page_lists_exactly_the_known_formats() -> None:
    for part, known_formats in zip(
        sections(), (STATISTICS_FORMATS, PLACEMENT_FORMATS), strict=True
    ):
        assert sorted(row_match[1] for row_match in ROW.finditer(part)) == sorted(
            known_format.name for known_format in known_formats
        )


def test_formats_page_lists_exactly_the_trace_formats() -> None:
    text = PAGE.read_text(encoding="utf-8")
    part = text.partition("## Routing traces")[2].partition("## ")[0]
    assert [row_match[1] for row_match in ROW.finditer(part)] == list(TRACE_FORMATS)
    assert tuple(TRACE_FORMATS) == TRACE_FORMAT_NAMES


def test_formats_page_names_every_suffix_and_mark() -> None:
    for part, known_formats in zip(
        sections(), (STATISTICS_FORMATS, PLACEMENT_FORMATS), strict=True
    ):
        rows = {row_match[1]: row_match[2] for row_match in ROW.finditer(part)}
        for known_format in known_formats:
            assert [
                s
                for s in known_format.write_suffixes
                if f"`{s}`" not in rows[known_format.name] and s
            ] == []
            assert (
                f"`{known_format.key_field}`" in rows[known_format.name]
                or "suffix |" in rows[known_format.name]
            )


def test_formats_page_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert example is not None
    folder = tmp_path / "recorded"
    folder.mkdir()
    meta = '{"num_experts": 256, "num_experts_per_token": 8}'
    (folder / "meta_info.json").write_text(meta, encoding="utf-8")
    counts = np.random.default_rng(1).integers(1, 10**5, 256)
    save_file({"0_3": counts}, folder / "rank0.safetensors")
    monkeypatch.chdir(tmp_path)
    exec(compile(example[1], str(PAGE), "exec"), {})
    assert (tmp_path / "placement.json").exists()
