"""What `equipoise doctor` says of an engine that is a stand-in."""

from importlib.metadata import EntryPoint, EntryPoints
from typing import Any

import pytest
from helpers.fakes.fake_vllm import engine

from equipoise.hal.errors import EngineUnsupported
from equipoise.integrations.vllm import compatibility, doctor
from equipoise.integrations.vllm.doctor import examine


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tested version, and a plugin that it finds."""
    monkeypatch.delenv(doctor.PLUGINS_VARIABLE, raising=False)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    monkeypatch.setattr(compatibility, "installed", lambda: compatibility.TESTED_VERSIONS[0])
    _points(monkeypatch, "equipoise.integrations.vllm.entry:register")


def _points(monkeypatch: pytest.MonkeyPatch, *where: str) -> None:
    points = EntryPoints(EntryPoint("equipoise", one, doctor.PLUGIN_GROUP) for one in where)
    monkeypatch.setattr(doctor, "entry_points", lambda group, name: points)


def findings() -> dict[str, tuple[bool | None, str]]:
    with engine():
        return {what: (so, detail) for what, so, detail in examine()}


def test_doctor_passes_hooks_and_fails_parts_with_missing_symbols() -> None:
    results = findings()
    assert results["vLLM"][0]
    assert results["plugin"] == (True, "found by vLLM")
    assert results["hooks"] == (True, "all 2 symbols are there, with their signatures")
    assert set(compatibility.FEATURE_SYMBOLS) <= set(results)
    assert not results["eplb"][0]
    assert "vllm.distributed.parallel_state:get_ep_group is missing" in results["eplb"][1]


def test_doctor_fails_untested_vllm_version_unless_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compatibility, "installed", lambda: "9.9")
    variable = compatibility.ACCEPT_VERSION_VARIABLE
    cure = f"{variable}=9.9 accepts it"
    assert findings()["vLLM"] == (False, f"9.9 was not tested; tested: 0.32.0, 0.33.0; {cure}")
    monkeypatch.setenv(variable, "9.9")
    assert findings()["vLLM"][0]


def test_doctor_passes_post_release_of_tested_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compatibility, "installed", lambda: "0.32.0.post2")
    message = "0.32.0.post2, a post-release of one that was tested"
    assert findings()["vLLM"] == (True, message)


def test_doctor_fails_plugin_that_is_excluded_or_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(doctor.PLUGINS_VARIABLE, "other,another")
    assert findings()["plugin"] == (False, "VLLM_PLUGINS=other,another leaves it out")
    monkeypatch.delenv(doctor.PLUGINS_VARIABLE)
    _points(monkeypatch)
    assert findings()["plugin"] == (
        False,
        "vLLM does not see it: install equipoise in vLLM's environment",
    )


@pytest.mark.parametrize("failing_part", ["entry", "plugin"])
def test_doctor_fails_plugin_that_cannot_be_imported(
    failing_part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if failing_part == "entry":
        _points(monkeypatch, "no_such_module:register")
    else:
        monkeypatch.setattr(doctor, "PLUGIN", "no_such_module")
    so, detail = findings()["plugin"]
    assert not so
    assert "cannot be imported: ModuleNotFoundError" in detail


def test_doctor_reports_only_missing_vllm_when_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent() -> Any:
        raise EngineUnsupported("vLLM is not installed")

    monkeypatch.setattr(compatibility, "installed", absent)
    assert findings() == {"vLLM": (False, "vLLM is not installed")}
