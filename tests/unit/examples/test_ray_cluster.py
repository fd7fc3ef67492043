"""Which calls Ray gets from the launcher: of a module that only notes them, for Ray is not here."""

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from helpers.fakes.fake_ray_cluster import part


class RayError(Exception):
    """The root of Ray's own."""


class GetTimeoutError(RayError):
    """Ray's word for an answer that does not come."""


class NoteTaker:
    """The few functions of Ray that are called, as its documentation has them."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.failure: Exception | None = None

    def init(self, **options: object) -> None:
        self.calls.append(("init", options))

    def nodes(self) -> list[dict[str, Any]]:
        living = {"NodeID": "a", "NodeManagerAddress": "10.0.0.1", "Alive": True}
        dead = {"NodeID": "b", "NodeManagerAddress": "10.0.0.2", "Alive": False, "Resources": {}}
        plain = {"NodeID": "c", "NodeManagerAddress": "10.0.0.3", "Alive": True}
        return [{**living, "Resources": {"GPU": 2.0, "NPU": 8.0}}, dead,
                {**plain, "Resources": {"CPU": 4.0}}]  # fmt: skip

    def remote(self, kind: type) -> Any:
        def options(**arguments_by_name: object) -> Any:
            self.calls.append(("options", arguments_by_name))
            return SimpleNamespace(remote=lambda *arguments: _Actor(kind(*arguments)))

        return SimpleNamespace(options=options)

    def get(self, reference: Callable[[], object], timeout: float) -> object:
        assert timeout > 0
        if self.failure is not None:
            raise self.failure
        return reference()

    def kill(self, actor: object) -> None:
        self.calls.append(("kill", actor))

    def shutdown(self) -> None:
        self.calls.append(("shutdown", None))


class _Actor:
    def __init__(self, inner: object) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)
        return SimpleNamespace(remote=lambda *arguments: lambda: method(*arguments))


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> NoteTaker:
    note_taker = NoteTaker()
    ray, strategies = ModuleType("ray"), ModuleType("ray.util.scheduling_strategies")
    for name in ("init", "nodes", "remote", "get", "kill", "shutdown"):
        setattr(ray, name, getattr(note_taker, name))
    errors = SimpleNamespace(RayError=RayError, GetTimeoutError=GetTimeoutError)
    monkeypatch.setattr(ray, "exceptions", errors, raising=False)
    kind = "NodeAffinitySchedulingStrategy"
    monkeypatch.setattr(strategies, kind, lambda **options: options, raising=False)
    for module in (ray, ModuleType("ray.util"), strategies):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return note_taker


def test_ray_cluster_places_server_as_actor_on_node(notes: NoteTaker) -> None:
    cluster = part("ray_launch.cluster").RayCluster("auto", "GPU")
    nodes = cluster.nodes()
    assert [(one.address, one.units) for one in nodes] == [("10.0.0.1", 2), ("10.0.0.3", 0)]
    server = cluster.place(nodes[0], 1)
    assert cluster.call(server, "hold", 0) > 0
    assert cluster.call(server, "status", 0.0) == "it was not started"
    cluster.call(server, "tell")
    cluster.release(server)
    cluster.close()
    there = {"node_id": "a", "soft": False}
    assert dict(notes.calls[1:2])["options"] == {
        "num_cpus": 0, "num_gpus": 1, "scheduling_strategy": there
    }  # fmt: skip
    assert [what for what, _ in notes.calls] == ["init", "options", "kill", "shutdown"]
    [folder] = dict(notes.calls)["init"]["runtime_env"]["py_modules"]
    assert folder.endswith("ray_launch"), "other nodes get the code"


def test_ray_cluster_requests_other_resource_by_name(notes: NoteTaker) -> None:
    cluster = part("ray_launch.cluster").RayCluster("auto", "NPU")
    node = cluster.nodes()[0]
    assert node.units == 8
    cluster.call(cluster.place(node, 8), "tell")
    assert dict(notes.calls)["options"]["resources"] == {"NPU": 8}
    assert "num_gpus" not in dict(notes.calls)["options"]


def test_ray_cluster_reports_ray_errors_in_one_line(notes: NoteTaker) -> None:
    cluster = part("ray_launch.cluster").RayCluster("auto", "GPU")
    server = cluster.place(cluster.nodes()[0], 1)
    cluster.call(server, "tell")
    launch_error = part("ray_launch.errors").LaunchError
    task = RayError("a traceback\nof many lines")
    for failure, why in (
        (GetTimeoutError("late"), "no answer within 60 s"),
        (task, "^a traceback$"),
        (RayError("\n"), "^RayError$"),
    ):
        notes.failure = failure
        with pytest.raises(launch_error, match=why):
            cluster.call(server, "hold", 0)
    task.cause = OSError("port 8000 cannot be had")  # type: ignore[attr-defined]  # as Ray has it
    notes.failure = task
    with pytest.raises(launch_error, match="port 8000 cannot be had"):
        cluster.call(server, "hold", 0)
