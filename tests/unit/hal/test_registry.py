"""Clause B3: backends by name."""

from types import SimpleNamespace

import pytest

from equipoise.backends.cpu import BACKEND, GLOO
from equipoise.backends.cpu.accelerator import CpuBackend
from equipoise.backends.virtual import BACKEND as VIRTUAL
from equipoise.backends.virtual import COMMUNICATOR
from equipoise.hal import registry
from equipoise.hal.accelerator import Backend
from equipoise.hal.communicator import CommunicatorBackend
from equipoise.hal.errors import BackendUnavailable


def test_installed_backends_are_found_by_name() -> None:
    assert registry.accelerator("cpu") is BACKEND
    assert registry.communicator("gloo") is GLOO
    assert registry.accelerators()["cpu"] is BACKEND
    assert registry.communicators()["gloo"] is GLOO
    assert registry.accelerator("virtual") is VIRTUAL
    assert registry.communicator("virtual") is COMMUNICATOR


def test_a_backend_that_is_not_installed_can_be_named_by_package_and_object() -> None:
    assert registry.accelerator("equipoise.backends.cpu:BACKEND") is BACKEND
    assert registry.communicator("equipoise.backends.cpu:GLOO") is GLOO


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(BackendUnavailable, match=r"unknown backend 'abacus'; known: .*\bcpu\b"):
        registry.accelerator("abacus")
    with pytest.raises(BackendUnavailable, match=r"unknown backend 'pigeon'; known: .*\bgloo\b"):
        registry.communicator("pigeon")


@pytest.mark.parametrize(
    "name", ["no.such.module:X", "equipoise.backends.cpu:NOTHING", ":X", "equipoise:", ".cpu:X"]
)
def test_a_name_that_does_not_import_is_unavailable(name: str) -> None:
    with pytest.raises(BackendUnavailable, match="does not import"):
        registry.accelerator(name)


@pytest.mark.parametrize("group", [registry.accelerator, registry.communicator])
def test_something_that_is_no_backend_is_refused(group: object) -> None:
    assert callable(group)
    with pytest.raises(BackendUnavailable, match="is not a"):
        group("equipoise:__version__")


def test_a_backend_of_the_other_kind_is_refused() -> None:
    with pytest.raises(BackendUnavailable, match="is not a CommunicatorBackend"):
        registry.communicator("equipoise.backends.cpu:BACKEND")
    with pytest.raises(BackendUnavailable, match="is not a Backend"):
        registry.accelerator("equipoise.backends.cpu:GLOO")


def test_a_class_is_not_taken_for_the_backend_that_it_would_make() -> None:
    assert isinstance(CpuBackend(), Backend)
    with pytest.raises(BackendUnavailable, match="is not a Backend"):
        registry.accelerator("equipoise.backends.cpu:CpuBackend")


def test_an_entry_point_that_does_not_import_is_unavailable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load() -> object:
        raise ImportError("no driver here")

    point = SimpleNamespace(name="lame", load=load)
    monkeypatch.setattr(registry, "entry_points", lambda **_: [point])
    with pytest.raises(BackendUnavailable, match="'lame' does not import: no driver here"):
        registry.accelerator("lame")
    assert registry.names(registry.ACCELERATORS) == ("lame",)


def test_backends_answer_before_anything_is_opened() -> None:
    assert isinstance(BACKEND, Backend)
    assert isinstance(GLOO, CommunicatorBackend)
    assert BACKEND.probe()
    assert GLOO.probe()
    assert GLOO.capabilities.independent_groups
    assert not BACKEND.capabilities.pinned_memory
