"""Which ranks there are, by the environment; and a run of one process."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import equipoise
from equipoise.connection import rendezvous_from
from equipoise.hal.errors import (
    BackendUnavailable,
    BallotIncomplete,
    ConfigError,
    ControlPlaneLost,
    UsageError,
)

WHERE = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "5"}


@pytest.fixture(autouse=True)
def unlaunched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*WHERE, "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def single_rank() -> Iterator[equipoise.Connection]:
    with equipoise.connect() as ranks:
        yield ranks


def test_rendezvous_comes_from_environment() -> None:
    where = rendezvous_from(WHERE, 3.0)
    assert (where.rank, where.size, where.host, where.port) == (1, 2, "127.0.0.1", 5)
    assert (where.deadline, where.namespace, where.hosts_store) == (3.0, "", False)


@pytest.mark.parametrize("name", sorted(WHERE))
def test_rendezvous_rejects_incomplete_environment(name: str) -> None:
    environment = {key: value for key, value in WHERE.items() if key != name}
    with pytest.raises(ControlPlaneLost, match="is missing or invalid"):
        rendezvous_from(environment, 3.0)


def test_rendezvous_rejects_non_numeric_port() -> None:
    with pytest.raises(ControlPlaneLost, match="is missing or invalid"):
        rendezvous_from({**WHERE, "MASTER_PORT": "http"}, 3.0)


@given(st.integers(0, 3), st.sampled_from(["True", "False", None]), st.integers(0, 9))
def test_first_rank_hosts_store_unless_agent_does(
    rank: int, agent: str | None, restarts: int
) -> None:
    agent_environment = {} if agent is None else {"TORCHELASTIC_USE_AGENT_STORE": agent}
    torchrun = {"TORCHELASTIC_RESTART_COUNT": str(restarts)}
    where = rendezvous_from({**WHERE, "RANK": str(rank), **agent_environment, **torchrun}, 3.0)
    assert where.hosts_store == (rank == 0 and agent != "True")
    assert where.namespace == f"equipoise/{restarts}/"


def test_process_without_launcher_is_the_only_rank(single_rank: equipoise.Connection) -> None:
    assert (single_rank.rank, single_rank.size, single_rank.device.type) == (0, 1, "cpu")
    single_rank.barrier()
    single_rank.barrier()
    single_rank.fabric.open("something").barrier().result(single_rank.deadline)


def test_connection_closes_twice_and_connects_again() -> None:
    sizes = []
    for _ in range(2):
        with equipoise.connect() as ranks:
            ranks.barrier()
            sizes.append(ranks.size)
        ranks.close()
    assert sizes == [1, 1]


def test_block_that_raises_closes_connection_and_keeps_its_error() -> None:
    with pytest.raises(ZeroDivisionError), equipoise.connect() as ranks:
        raise ZeroDivisionError
    with pytest.raises(ControlPlaneLost):
        ranks.barrier(0.1)


def test_barrier_names_rank_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    with equipoise.connect() as ranks:
        monkeypatch.setattr(type(ranks.fabric.control), "size", 2)
        with pytest.raises(BallotIncomplete) as error:
            ranks.barrier(0.1)
        assert error.value.missing == (1,)
        monkeypatch.undo()


def test_unknown_backend_is_refused_before_anything_opens() -> None:
    with pytest.raises(BackendUnavailable, match="unknown backend 'gpu'"):
        equipoise.connect("gpu")
    with pytest.raises(BackendUnavailable, match="unknown communicator 'tcp'"):
        equipoise.connect(communicator="tcp")


@pytest.mark.parametrize("deadline", [0, -1, float("nan"), float("inf"), None, "5"])
def test_deadline_that_is_no_time_is_refused_by_name(deadline: Any) -> None:
    with pytest.raises(ConfigError, match=r"^deadline must be "):
        equipoise.connect(deadline=deadline)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "violations"),
    [("virtual", []), ("helpers.fakes.broken_stream_backends:BACKEND", ["O3"])],
)
def test_backend_check_says_of_each_clause_whether_it_held(
    backend: str, violations: list[str]
) -> None:
    result = equipoise.check_backend(backend, families=["ordering"])
    statuses = {clause.clause: clause.status for clause in result.clauses()}
    assert [clause for clause, status in statuses.items() if status == "violated"] == violations
    assert statuses["O3"] == ("violated" if violations else "held")
    assert result.exit_code == bool(violations)


def test_backend_check_refuses_unknown_family_and_profile() -> None:
    with pytest.raises(UsageError, match=r"families \['speed'\] are unknown; known: ordering"):
        equipoise.check_backend(families=["speed"])
    with pytest.raises(UsageError, match="profile 'quick' is unknown; known: ci, deep"):
        equipoise.check_backend(profile="quick")
