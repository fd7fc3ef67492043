"""`equipoise.hal` exports every public class of its modules, and loads torch lazily."""

import inspect
import subprocess
import sys
from importlib import import_module

import pytest

import equipoise.hal
from equipoise.hal import HOMES

ELSEWHERE = {"Probe"}
"""Public names that are aliases of exported ones."""


@pytest.mark.parametrize("module", sorted(HOMES))
def test_hal_exports_every_public_protocol_class(module: str) -> None:
    submodule = import_module(f"equipoise.hal.{module}")
    public = {
        name
        for name, value in vars(submodule).items()
        if inspect.isclass(value) and value.__module__ == submodule.__name__ and name[0] != "_"
    }
    assert public - ELSEWHERE == set(HOMES[module])
    for name in HOMES[module]:
        assert getattr(equipoise.hal, name) is getattr(submodule, name)


def test_hal_unknown_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Gate'"):
        equipoise.hal.Gate  # noqa: B018


def test_errors_import_does_not_import_torch() -> None:
    code = "import sys, equipoise.hal.errors; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
