"""A worker's features replace what an earlier engine of the process has left."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from equipoise.integrations.vllm.entry import ORIGINAL_ATTRIBUTE
from equipoise.integrations.vllm.eplb.install import POLICY_MODULE, POLICY_NAME
from equipoise.integrations.vllm.settings import Settings
from equipoise.integrations.vllm.worker_extension import enable_features


def policies(monkeypatch: pytest.MonkeyPatch, **installed: Any) -> dict[str, Any]:
    """The engine's table of policies, with one that an engine before has put there."""
    module: Any = ModuleType(POLICY_MODULE)
    module.EPLB_POLICIES = {POLICY_NAME: SimpleNamespace(**installed)}
    monkeypatch.setitem(sys.modules, POLICY_MODULE, module)
    eplb_policies: dict[str, Any] = module.EPLB_POLICIES
    return eplb_policies


def test_worker_without_parts_restores_stock_policy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    eplb_policies = policies(monkeypatch, **{ORIGINAL_ATTRIBUTE: "stock"})
    parts = enable_features(SimpleNamespace(), Settings())
    assert eplb_policies == {POLICY_NAME: "stock"}
    assert parts.placement() is None
    parts.close()
    assert eplb_policies == {POLICY_NAME: "stock"}


def test_worker_without_parts_keeps_third_party_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    eplb_policies = policies(monkeypatch, theirs=True)
    enable_features(SimpleNamespace(), Settings()).close()
    assert eplb_policies[POLICY_NAME].theirs
