from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from equipoise.balancer.observe.trace_buffer import ImbalanceSample, RecordedSpan
from equipoise.demo.run_record import Rebalance, RunRecord, VariantRecord, load_record, save_record
from equipoise.hal.errors import UsageError

REBALANCE = Rebalance(
    number=1,
    opened_at=9,
    step=13,
    outcome="committed",
    copies=3,
    bytes_moved=99,
    seconds={"transferring": 0.5},
    before=0.4,
    predicted=0.1,
    actual=None,
)


def record() -> RunRecord:
    variant = VariantRecord(
        name="exact",
        rank_rows=np.arange(12, dtype=np.int64).reshape(3, 2, 2),
        step_seconds=np.array([0.5, 0.25, 0.125]),
        rebalances=(REBALANCE,),
        aborts={"plans differ": 2},
        outputs="ab",
    )
    return RunRecord(
        version="1",
        backend="cpu",
        communicator="gloo",
        ranks=2,
        layers=2,
        experts=4,
        top_k=1,
        slots=6,
        steps=3,
        shares="exact",
        phases=("one", "zwei"),
        switch_steps=(2,),
        engine_options={"commit": "staged", "target": 0.02, "staging_bytes": 9},
        step_tokens=np.array([1, 2, 3], dtype=np.int64),
        expert_rows=np.ones((3, 2, 4), dtype=np.int64),
        variants={"exact": variant},
        reference_outputs="ab",
        prompts=("def f", "漢字\ufffd"),
        continuations=("():", "\x01"),
        spans=(RecordedSpan(1, "transfer", "move", 1.5, 1.75, {"layers": [0, 2]}),),
        levels=(ImbalanceSample(0, 1.5, 0.25),),
        machine={"cores": "2"},
    )


def test_run_record_round_trips_through_file(tmp_path: Path) -> None:
    original = record()
    save_record(original, tmp_path / "record.npz")
    copy = load_record(tmp_path / "record.npz")
    for field in fields(RunRecord):
        if field.name != "variants":
            np.testing.assert_equal(getattr(copy, field.name), getattr(original, field.name))
    original_variant, copied_variant = original.variants["exact"], copy.variants["exact"]
    for field in fields(VariantRecord):
        np.testing.assert_equal(
            getattr(copied_variant, field.name), getattr(original_variant, field.name)
        )
    assert copied_variant.rank_rows.dtype == np.int64


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 not an archive", b"text"])
def test_load_record_rejects_other_files(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.npz"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"other\.npz is not the record of a run"):
        load_record(path)


def test_load_record_rejects_pickled_arrays(tmp_path: Path) -> None:
    path = tmp_path / "evil.npz"
    np.savez(path, record=np.array([object()], dtype=object))
    with pytest.raises(UsageError, match="is not the record"):
        load_record(path)
