"""A run that takes no time, and a way to call the program."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from equipoise.balancer.formats import read_placement
from equipoise.cli.main import main
from equipoise.demo import launcher
from equipoise.demo.progress import RunProgress
from equipoise.demo.run_record import Rebalance, RunRecord, VariantRecord
from equipoise.demo.settings import Balance, RunSettings, available_variants

STEPS, LAYERS = 12, 2


@dataclass(frozen=True)
class Answer:
    """Exit code and output of one call of the program."""

    code: int
    out: str
    err: str


@pytest.fixture
def equipoise(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., Answer]:
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> Answer:
        code = main(arguments)
        outputs = capsys.readouterr()
        return Answer(code, outputs.out, outputs.err)

    return call


def variant(name: str, load: tuple[int, ...]) -> VariantRecord:
    rebalances = tuple(
        Rebalance(number=i, opened_at=s - 1, step=s, outcome="committed", copies=1, bytes_moved=9)
        for i, s in enumerate((2, 4, 7, 9))
    )
    return VariantRecord(
        name=name,
        rank_rows=np.tile(np.array(load), (STEPS, LAYERS, 1)),
        step_seconds=np.full(STEPS, 0.1),
        rebalances=() if name in ("unbalanced", "placement") else rebalances,
        aborts={},
        outputs="same",
    )


def record_of(settings: RunSettings) -> RunRecord:
    load = tuple(10 + 10 * (rank == 0) for rank in range(settings.ranks))
    even = (10,) * settings.ranks
    is_balanced = settings.balance is Balance.ON
    served = [
        str(name)
        for name in available_variants(settings)
        if not settings.variants or name in settings.variants
    ]
    about, digest = str(settings.shares) if is_balanced else "none", ""
    if settings.placement is not None:
        about = "placement"
        digest = read_placement(settings.placement, ranks=settings.ranks).digest
    return RunRecord(
        version="0.1.0",
        backend=settings.backend,
        communicator=settings.communicator,
        ranks=settings.ranks,
        layers=LAYERS,
        experts=32,
        top_k=4,
        slots=settings.slots,
        steps=STEPS,
        shares=about,
        placement=digest,
        phases=("prose", "code"),
        switch_steps=(6,),
        step_tokens=np.full(STEPS, 32),
        expert_rows=np.ones((STEPS, LAYERS, 32), dtype=np.int64),
        variants={name: variant(name, load if name == "unbalanced" else even) for name in served},
        reference_outputs="same",
    )


@pytest.fixture
def launched_settings(monkeypatch: pytest.MonkeyPatch) -> list[RunSettings]:
    """Settings that the launcher was called with; it answers at once."""
    settings_seen: list[RunSettings] = []

    def run_demo(settings: RunSettings, progress: RunProgress) -> RunRecord:
        settings_seen.append(settings)
        progress.variant("unbalanced", STEPS)
        progress.step(STEPS, 0.25, "")
        return record_of(settings)

    monkeypatch.setattr(launcher, "run_demo", run_demo)
    return settings_seen
