"""What the backend takes of torch_npu that no page describes: one file, and probed for."""

import ast
import importlib
import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.paths import ROOT

from equipoise.backends.ascend import BACKEND, npu_runtime, private_api
from equipoise.backends.ascend.private_api import NAMES
from equipoise.hal.capabilities import Available, Unavailable

ASCEND = ROOT / "backends" / "ascend"
UNIQUE = {name.rpartition(".")[2] for name in NAMES} - {"shutdown"} | {"_C", "ProcessGroupHCCL"}
"""What means nothing else than torch_npu's own, wherever it is read or called."""


def torch_npu_without(*lacking: str) -> Any:
    """A module that has all names but these, and two devices."""
    root_module = SimpleNamespace(__version__="2.15.0", npu=SimpleNamespace(device_count=lambda: 2))
    for name in NAMES:
        *path, last = name.split(".")
        at: Any = root_module
        for part in path:
            at = vars(at).setdefault(part, SimpleNamespace())
        if name not in lacking:
            setattr(at, last, object())
    return root_module


@pytest.fixture
def fake_torch_npu(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    module = torch_npu_without(*request.param)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(private_api, "import_module", lambda name: module)
    monkeypatch.setattr(npu_runtime, "import_module", lambda name: module)
    monkeypatch.setattr(npu_runtime, "npu", lambda: module.npu)


@pytest.mark.parametrize("fake_torch_npu", [()], indirect=True)
@pytest.mark.usefixtures("fake_torch_npu")
def test_probe_accepts_torch_npu_with_every_private_name() -> None:
    assert BACKEND.probe() == Available("torch_npu 2.15.0, 2 device(s)")


LACKING = ("npu._subscribe_report", "_C._npu_getLocalDevice")


@pytest.mark.parametrize("fake_torch_npu", [LACKING], indirect=True)
@pytest.mark.usefixtures("fake_torch_npu")
def test_probe_refuses_torch_npu_without_private_names() -> None:
    assert BACKEND.probe() == Unavailable(
        "torch_npu 2.15.0 lacks _C._npu_getLocalDevice, npu._subscribe_report: "
        "install torch_npu 2.13.0, which was tested"
    )


def test_private_names_are_used_in_one_file_only() -> None:
    elsewhere = {
        (path.name, node.attr)
        for path in ASCEND.glob("*.py")
        if path.name != "private_api.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in UNIQUE
    }
    assert elsewhere == set()


def test_private_names_are_all_used() -> None:
    text = (ASCEND / "private_api.py").read_text(encoding="utf-8")
    names = {node.attr for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)}
    assert {name.rpartition(".")[2] for name in NAMES} <= names
