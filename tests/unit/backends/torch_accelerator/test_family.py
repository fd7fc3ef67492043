"""The family `accelerator` where torch has none: it says why, and opens nothing."""

from types import SimpleNamespace

import pytest
import torch

from equipoise.backends.torch_accelerator import accelerator, family
from equipoise.hal import registry
from equipoise.hal.capabilities import Unavailable
from equipoise.hal.errors import BackendUnavailable


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Entry points of plug-ins; torch has no accelerator, whatever is installed here."""
    points: list[object] = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    monkeypatch.setattr(accelerator, "entry_points", lambda group: points)
    accelerator._load_plugins.cache_clear()
    accelerator._has_graphs.cache_clear()
    return points


@pytest.mark.parametrize("device_type", ["", "npu"])
def test_family_without_accelerator_is_unavailable(plugins: list[object], device_type: str) -> None:
    backend = family(device_type)
    answer = backend.probe()
    assert isinstance(answer, Unavailable)
    assert "no accelerator here: install" in answer.reason
    assert backend.devices() == 0
    assert backend.name == f"accelerator:{device_type}"
    with pytest.raises(BackendUnavailable, match="no accelerator"):
        backend.open(0)


def test_family_declares_no_graphs_without_accelerator(plugins: list[object]) -> None:
    declared = family("npu").capabilities
    assert not declared.graph_capture
    assert not declared.stream_lock


def test_family_names_plugin_that_does_not_load(plugins: list[object]) -> None:
    def load() -> None:
        raise OSError("libdriver.so: cannot open\nand more")

    plugins.append(SimpleNamespace(name="torch_vendor", load=lambda: load))
    answer = family("vendor").probe()
    assert answer == Unavailable(
        "torch has no accelerator here: torch_vendor does not load: libdriver.so: cannot open"
    )


def test_family_of_other_device_type_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    answer = family("cuda").probe()
    assert answer == Unavailable("torch's accelerator here is xpu, not cuda")


def test_registry_finds_member_of_accelerator_family() -> None:
    assert registry.accelerator("accelerator:npu").name == "accelerator:npu"
