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


def test_registry_finds_installed_backends() -> None:
    assert registry.accelerator("cpu") is BACKEND
    assert registry.communicator("gloo") is GLOO
    assert registry.accelerators()["cpu"] is BACKEND
    assert registry.communicators()["gloo"] is GLOO
    assert registry.accelerator("virtual") is VIRTUAL
    assert registry.communicator("virtual") is COMMUNICATOR


def test_registry_accepts_package_and_object_name() -> None:
    assert registry.accelerator("equipoise.backends.cpu:BACKEND") is BACKEND
    assert registry.communicator("equipoise.backends.cpu:GLOO") is GLOO


def test_registry_makes_member_of_family(monkeypatch: pytest.MonkeyPatch) -> None:
    """A family takes precedence over a package of its name."""
    point = SimpleNamespace(load=lambda: lambda name: CpuBackend() if name == "any" else None)
    group = "equipoise.accelerator_families"
    monkeypatch.setattr(
        registry,
        "entry_points",
        lambda **wanted: [point] if wanted == {"group": group, "name": "equipoise"} else [],
    )
    assert isinstance(registry.accelerator("equipoise:any"), CpuBackend)
    with pytest.raises(BackendUnavailable, match="'equipoise:other' is not a Backend"):
        registry.accelerator("equipoise:other")
    with pytest.raises(BackendUnavailable, match="does not import"):
        registry.communicator("no_such_family:any")


def test_registry_refuses_library_without_capabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(name="x", capabilities={"padding": True}, probe=print, open=print)
    monkeypatch.setattr(registry, "_load", lambda group, name: library)
    with pytest.raises(BackendUnavailable, match="capabilities are no ExpertParallelCapabilities"):
        registry.expert_parallel("x")


def test_registry_unknown_name_lists_known_ones() -> None:
    with pytest.raises(BackendUnavailable, match=r"unknown backend 'abacus'; known: .*\bcpu\b"):
        registry.accelerator("abacus")
    with pytest.raises(BackendUnavailable, match=r"unknown communicator 'pigeon'; known: .*\bgloo"):
        registry.communicator("pigeon")


@pytest.mark.parametrize(
    "name", ["no.such.module:X", "equipoise.backends.cpu:NOTHING", ":X", "equipoise:", ".cpu:X"]
)
def test_registry_refuses_name_that_does_not_import(name: str) -> None:
    with pytest.raises(BackendUnavailable, match="does not import"):
        registry.accelerator(name)


@pytest.mark.parametrize("group", [registry.accelerator, registry.communicator])
def test_registry_refuses_object_that_is_no_backend(group: object) -> None:
    assert callable(group)
    with pytest.raises(BackendUnavailable, match="is not a"):
        group("equipoise:__version__")


def test_registry_names_members_that_a_backend_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    half = SimpleNamespace(name="half", probe=print, open=print)
    monkeypatch.setattr("equipoise.half", half, raising=False)
    with pytest.raises(
        BackendUnavailable, match=r"is not a Backend: .* lacks communicator, capabilities, devices$"
    ):
        registry.accelerator("equipoise:half")


def test_registry_refuses_backend_of_other_kind() -> None:
    with pytest.raises(BackendUnavailable, match="is not a CommunicatorBackend"):
        registry.communicator("equipoise.backends.cpu:BACKEND")
    with pytest.raises(BackendUnavailable, match="is not a Backend"):
        registry.accelerator("equipoise.backends.cpu:GLOO")


def test_registry_refuses_backend_class() -> None:
    assert isinstance(CpuBackend(), Backend)
    with pytest.raises(BackendUnavailable, match="is not a Backend"):
        registry.accelerator("equipoise.backends.cpu.accelerator:CpuBackend")


def test_registry_reports_entry_point_that_does_not_import(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load() -> object:
        raise ImportError("no driver here")

    point = SimpleNamespace(name="lame", load=load)
    monkeypatch.setattr(registry, "entry_points", lambda **_: [point])
    with pytest.raises(BackendUnavailable, match="'lame' does not import: no driver here"):
        registry.accelerator("lame")
    assert registry.names(registry.ACCELERATORS) == ("lame",)


def test_backends_answer_probe_before_open() -> None:
    assert isinstance(BACKEND, Backend)
    assert isinstance(GLOO, CommunicatorBackend)
    assert BACKEND.probe()
    assert GLOO.probe()
    assert GLOO.capabilities.independent_groups
    assert not BACKEND.capabilities.pinned_memory


class PointOfFamily:
    """An entry point of a family."""

    name = "pigeons"

    def load(self) -> object:
        return lambda name: SimpleNamespace(**vars_of_gloo(), ring=name)


def vars_of_gloo() -> dict[str, object]:
    names = ("name", "capabilities", "probe", "launcher_rendezvous", "host", "connect")
    return {name: getattr(GLOO, name) for name in names}


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch) -> None:
    def points(group: str, name: str | None = None) -> list[PointOfFamily]:
        asked = group == registry.FAMILIES[registry.COMMUNICATORS] and name in (None, "pigeons")
        return [PointOfFamily()] if asked else []

    monkeypatch.setattr(registry, "entry_points", points)


@pytest.mark.usefixtures("family")
def test_registry_calls_family_with_what_follows_its_name() -> None:
    found: object = registry.communicator("pigeons:post:grey")
    assert getattr(found, "ring", None) == "post:grey"


@pytest.mark.usefixtures("family")
def test_registry_lists_families_of_communicators_only() -> None:
    with pytest.raises(BackendUnavailable, match=r"or PACKAGE:OBJECT or pigeons:NAME\)"):
        registry.communicator("carrier")
    with pytest.raises(BackendUnavailable, match=r"\(or PACKAGE:OBJECT\)"):
        registry.accelerator("carrier")
    with pytest.raises(BackendUnavailable, match="is a communicator, not a backend"):
        registry.accelerator("pigeons:post")


def test_registry_finds_judged_libraries() -> None:
    assert registry.communicator("c10d:gloo").name == "c10d:gloo"
    with pytest.raises(BackendUnavailable, match="no backend 'pigeon'"):
        registry.communicator("c10d:pigeon")
