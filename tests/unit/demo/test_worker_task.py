from pathlib import Path

import pytest

from equipoise.balancer.formats import Iterations
from equipoise.demo.settings import (
    Balance,
    RecordingSettings,
    RoutingRule,
    RunSettings,
    Shares,
    VariantName,
)
from equipoise.demo.worker import RankTask, rendezvous_from
from equipoise.hal.errors import ControlPlaneLost

WHERE = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "5"}


@pytest.mark.parametrize("placement", [None, Path("p ü.json")])
@pytest.mark.parametrize("recording", [None, RecordingSettings(Path("a b"), Iterations(3, 9))])
def test_worker_task_round_trips_through_json_line(
    placement: Path | None, recording: RecordingSettings | None
) -> None:
    settings = RunSettings(
        ranks=2,
        text=(Path("a b.txt"), Path("ü.txt")),
        shares=Shares.LAGGED,
        variants=(VariantName.UNBALANCED, VariantName.LAGGED),
        balance=Balance.OFF,
        routing_rule=RoutingRule.TRTLLM_ROUND_ROBIN,
        staging_bytes=1 << 30,
        sigma=0.5,
        deadline=1.5,
        out=Path("o"),
        placement=placement,
        metrics_port=9400,
        wandb="mine",
        log_rebalances=True,
        log_balancedness_interval=7,
    )
    task = RankTask(settings, Path("r.npz"), launcher=77, recording=recording)
    line = task.to_json()
    assert "\n" not in line
    found = RankTask.from_json(line)
    assert found == task
    # A word equals its text, but is not it: what asks for the word itself would not find it.
    kinds = {key: type(value) for key, value in vars(settings).items()}
    assert {key: type(value) for key, value in vars(found.settings).items()} == kinds
    assert [type(name) for name in found.settings.variants] == [VariantName, VariantName]


def test_rendezvous_comes_from_environment() -> None:
    where = rendezvous_from(WHERE, 3.0)
    assert (where.rank, where.size, where.host, where.port) == (1, 2, "127.0.0.1", 5)
    assert where.deadline == 3.0


@pytest.mark.parametrize("name", sorted(WHERE))
def test_rendezvous_rejects_incomplete_environment(name: str) -> None:
    rest = {key: value for key, value in WHERE.items() if key != name}
    with pytest.raises(ControlPlaneLost, match="no meeting point"):
        rendezvous_from(rest, 3.0)


def test_rendezvous_rejects_non_numeric_port() -> None:
    with pytest.raises(ControlPlaneLost, match="no meeting point"):
        rendezvous_from({**WHERE, "MASTER_PORT": "http"}, 3.0)
