"""A worker's parts replace whatever an engine before it in the process has left behind."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from equipoise.integrations.vllm.eplb.install import NAME, POLICIES
from equipoise.integrations.vllm.patching import MARK
from equipoise.integrations.vllm.settings import Settings
from equipoise.integrations.vllm.worker_extension import enter


def policies(monkeypatch: pytest.MonkeyPatch, **installed: Any) -> dict[str, Any]:
    """The engine's table of policies, with one that an engine before has put there."""
    module: Any = ModuleType(POLICIES)
    module.EPLB_POLICIES = {NAME: SimpleNamespace(**installed)}
    monkeypatch.setitem(sys.modules, POLICIES, module)
    found: dict[str, Any] = module.EPLB_POLICIES
    return found


def test_worker_without_parts_restores_stock_policy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = policies(monkeypatch, **{MARK: "stock"})
    parts = enter(SimpleNamespace(), Settings())
    assert found == {NAME: "stock"}
    assert parts.placement() is None
    parts.close()
    assert found == {NAME: "stock"}


def test_worker_without_parts_keeps_third_party_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    found = policies(monkeypatch, theirs=True)
    enter(SimpleNamespace(), Settings()).close()
    assert found[NAME].theirs
