"""Clause R2: what our own backends leave undeclared, pinned; the contract's last table says it."""

import re

from helpers.paths import ROOT

from equipoise.backends.cpu import BACKEND, GLOO
from equipoise.hal.capabilities import SlotFormat


def undeclared_in_contract(name: str) -> set[str]:
    """Words in code marks in the second column of a backend's row."""
    text = (ROOT / "docs" / "contract.md").read_text(encoding="utf-8")
    table = text.partition("## What our own backends declare unsupported")[2]
    (row,) = [line for line in table.splitlines() if f"`{name}` |" in line]
    return set(re.findall(r"`(\w+)`", row.split("|")[2]))


def test_cpu_undeclared_capabilities_match_contract() -> None:
    capabilities = BACKEND.capabilities
    flags = (
        "stream_lock",
        "copy_independent_of_launch",
        "graph_capture",
        "pinned_memory",
        "levelled_routing_on_device",
    )
    assert {flag for flag in flags if not getattr(capabilities, flag)} == {"pinned_memory"}
    assert capabilities.slot_formats == {SlotFormat.STRIDED}
    assert undeclared_in_contract("cpu") == {"pinned_memory"}


def test_gloo_undeclared_capabilities_match_contract() -> None:
    capabilities = GLOO.capabilities
    flags = ("stream_ordered", "independent_groups", "abort", "rebuild", "shared_devices")
    missing = {flag for flag in flags if not getattr(capabilities, flag)}
    assert missing == undeclared_in_contract("gloo") == {"stream_ordered", "abort"}


def test_cpu_defaults_to_gloo_without_launcher() -> None:
    assert BACKEND.communicator == GLOO.name
    assert GLOO.launcher_rendezvous() is None
