"""What the MPI backend says before anything is opened."""

import os
import re
import subprocess
import sys

import pytest
import torch
from helpers.paths import ROOT

from equipoise.backends.mpi import BACKEND, backend
from equipoise.backends.mpi.world import LAUNCHERS
from equipoise.hal import registry
from equipoise.hal.capabilities import Available, Unavailable
from equipoise.hal.communicator import CommunicatorBackend

ALONE = """
import sys
from equipoise.backends.mpi import BACKEND
assert BACKEND.capabilities.independent_groups
BACKEND.probe()
assert BACKEND.launcher_rendezvous() is None
assert not {"mpi4py.MPI"} & set(sys.modules), "MPI was imported"
"""


def test_registry_finds_mpi_backend() -> None:
    assert isinstance(BACKEND, CommunicatorBackend)
    assert registry.communicator("mpi") is BACKEND


def test_mpi_undeclared_capabilities_match_contract() -> None:
    """Clause R2."""
    capabilities = BACKEND.capabilities
    flags = ("stream_ordered", "independent_groups", "abort", "rebuild", "shared_devices")
    missing = {flag for flag in flags if not getattr(capabilities, flag)}
    contract = (ROOT / "docs" / "contract.md").read_text(encoding="utf-8")
    (row,) = [line for line in contract.splitlines() if line.startswith("| communicator `mpi` |")]
    assert missing == set(re.findall(r"`(\w+)`", row.split("|")[2]))


def test_declared_reductions_are_native_mpi_sums() -> None:
    capabilities = BACKEND.capabilities
    assert capabilities.reductions == {
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float32, torch.float64),
    }
    assert capabilities.reductions < capabilities.dtypes


def test_probe_names_missing_mpi4py_and_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "find_spec", lambda name: None)
    assert BACKEND.probe() == Unavailable(
        "mpi4py is not installed: pip install '.[mpi]' in a clone of equipoise"
    )


def test_probe_reports_mpi4py_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "find_spec", lambda name: object())
    monkeypatch.setattr(backend, "version", lambda name: "4.9")
    assert BACKEND.probe() == Available("mpi4py 4.9")


@pytest.mark.slow
def test_joined_without_launcher_does_not_import_mpi() -> None:
    result = subprocess.run([sys.executable, "-c", ALONE], timeout=240, env=_without_launcher())
    assert result.returncode == 0


def test_backend_host_opens_local_store() -> None:
    host = BACKEND.host()
    name, port = host.address
    host.close()
    assert name == "127.0.0.1"
    assert port > 0


def _without_launcher() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
