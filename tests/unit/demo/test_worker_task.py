from pathlib import Path

import pytest

from equipoise.balancer.formats import IterationRange
from equipoise.demo.settings import (
    Balance,
    RecordedContent,
    RecordingSettings,
    RoutingRule,
    RunSettings,
    Shares,
    VariantName,
)
from equipoise.demo.worker import RankTask


@pytest.mark.parametrize("placement", [None, Path("p ü.json")])
@pytest.mark.parametrize(
    "recording",
    [
        None,
        RecordingSettings(Path("a b"), IterationRange(3, 9)),
        RecordingSettings(Path("a b"), IterationRange(3, 9), RecordedContent.TOKENS),
    ],
)
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
        live=True,
    )
    task = RankTask(settings, Path("r.npz"), launcher=77, recording=recording)
    line = task.to_json()
    assert "\n" not in line
    decoded_task = RankTask.from_json(line)
    assert decoded_task == task
    # A word equals its text, but is not it: what asks for the word itself would not find it.
    kinds = {key: type(value) for key, value in vars(settings).items()}
    assert {key: type(value) for key, value in vars(decoded_task.settings).items()} == kinds
    assert [type(name) for name in decoded_task.settings.variants] == [VariantName, VariantName]
