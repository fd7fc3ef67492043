"""docs/formats.md has every format that is known, and its example holds."""

import re
from pathlib import Path

import numpy as np
import pytest
from helpers.paths import ROOT
from safetensors.numpy import save_file

from equipoise.balancer.formats.registry import PLACEMENT_FORMATS, STATISTICS_FORMATS

PAGE = ROOT / "docs" / "formats.md"
ROW = re.compile(r"^\| `([a-z-]+)` \|(.*)\|$", re.MULTILINE)


def sections() -> list[str]:
    """The parts about statistics and about placements."""
    return re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:3]


def test_formats_page_lists_exactly_the_known_formats() -> None:
    for part, known in zip(sections(), (STATISTICS_FORMATS, PLACEMENT_FORMATS), strict=True):
        assert sorted(found[1] for found in ROW.finditer(part)) == sorted(f.name for f in known)


def test_formats_page_names_every_suffix_and_mark() -> None:
    for part, known in zip(sections(), (STATISTICS_FORMATS, PLACEMENT_FORMATS), strict=True):
        rows = {found[1]: found[2] for found in ROW.finditer(part)}
        for form in known:
            assert [s for s in form.write_suffixes if f"`{s}`" not in rows[form.name] and s] == []
            assert f"`{form.key_field}`" in rows[form.name] or "suffix |" in rows[form.name]


def test_formats_page_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    folder = tmp_path / "recorded"
    folder.mkdir()
    meta = '{"num_experts": 256, "num_experts_per_token": 8}'
    (folder / "meta_info.json").write_text(meta, encoding="utf-8")
    counts = np.random.default_rng(1).integers(1, 10**5, 256)
    save_file({"0_3": counts}, folder / "rank0.safetensors")
    monkeypatch.chdir(tmp_path)
    exec(compile(found[1], str(PAGE), "exec"), {})
    assert (tmp_path / "placement.json").exists()
