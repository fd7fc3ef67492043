"""Everything that a run measured, and its file: arrays and one JSON text in an archive, no pickle.

Tables, plots and JSON figures are made from a `RunRecord` alone.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from equipoise.balancer.observe.trace_buffer import ImbalanceSample, RecordedSpan
from equipoise.demo.engine_options import EngineOptions
from equipoise.hal.errors import UsageError

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Rebalance:
    """One rebalance: opened before `opened_at`, took effect before `step`."""

    number: int
    opened_at: int
    step: int
    outcome: str
    """`committed`, `unchanged`, or the reason of the abort."""
    copies: int
    """Copies that the receiving ranks did not hold; 0 where only shares changed."""
    bytes_moved: int
    seconds: dict[str, float] = field(default_factory=dict)
    """By phase, on rank 0."""
    before: float | None = None
    """Imbalance, under the load planned on, of what was installed; None where no plan was made."""
    predicted: float | None = None
    """The same of the plan."""
    actual: float | None = None
    """In the first sub-window after it; None where it was not seen."""
    moves: tuple[tuple[int, int, int | None, int], ...] = ()
    """Layer, expert, the rank that sent it and the rank that got it, of each copy; None: it came
    from the host's memory. Empty in older records."""


@dataclass(frozen=True, kw_only=True)
class VariantRecord:
    """The same traffic served once; `name` is `unbalanced`, `placement` or a share mode."""

    name: str
    rank_rows: Counts
    """(steps, layers, ranks): rows, one per (token, k), that each rank's experts computed."""
    step_seconds: npt.NDArray[np.float64]
    """(steps,): wall seconds of a step, the slowest rank's."""
    rebalances: tuple[Rebalance, ...]
    aborts: dict[str, int]
    """Aborted rebalances by reason."""
    outputs: str
    """Hexadecimal digest of all logits and all tokens."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A whole run."""

    version: str
    backend: str
    communicator: str
    ranks: int
    """Of a stage: those that share its experts; all where there is one stage."""
    layers: int
    experts: int
    top_k: int
    slots: int
    steps: int
    shares: str
    """The share mode of the variant that the run is about; `none` without balancing, `placement`
    where one was given."""
    phases: tuple[str, ...]
    """Names of the kinds of text, in the order they are served."""
    switch_steps: tuple[int, ...]
    """The first step of every phase but the first."""
    step_tokens: Counts
    """(steps,): tokens in each forward, over all ranks."""
    expert_rows: Counts
    """(steps, layers, experts): rows per logical expert, over all ranks (the same in every
    variant, since outputs are)."""
    variants: dict[str, VariantRecord]
    reference_outputs: str
    """Digest of one process that served the same requests without any exchange."""
    stages: int = 1
    """Of the pipeline, each of `ranks` ranks."""
    tensor_ranks: int = 1
    """Ranks of a stage that serve the same requests."""
    placement: str = ""
    """Digest of the placement that was given to be served unchanged; empty where none was."""
    engine_options: EngineOptions = field(default_factory=dict)
    """Options of the engine, by name; empty without one, and in older records."""
    prompts: tuple[str, ...] = ()
    """A sample prompt of each phase."""
    continuations: tuple[str, ...] = ()
    """What the model wrote after it."""
    spans: tuple[RecordedSpan, ...] = ()
    """What every rank did when, in the variant that the run is about."""
    levels: tuple[ImbalanceSample, ...] = ()
    """The imbalance that rank 0 saw meanwhile."""
    machine: dict[str, str] = field(default_factory=dict)
    """Processor, cores, operating system, versions of Python, torch and numpy."""


ARRAYS = ("step_tokens", "expert_rows")
VARIANT_ARRAYS = ("rank_rows", "step_seconds")


def save_record(record: RunRecord, path: Path) -> None:
    """Write `record`; the file's name ends in .npz."""
    facts = asdict(record)
    arrays = {name: facts.pop(name) for name in ARRAYS}
    for variant, fields in facts["variants"].items():
        for name in VARIANT_ARRAYS:
            arrays[f"{variant}.{name}"] = fields.pop(name)
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, record=np.array(json.dumps(facts)), **arrays)


def load_record(path: Path) -> RunRecord:
    """Read what `save_record` wrote. Raises `UsageError` for anything else."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            stored = {name: archive[name] for name in archive.files}
        facts = json.loads(str(stored.pop("record")))
        return _restore(facts, stored)
    except (OSError, EOFError, BadZipFile, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is not the record of a run: {error}") from error


def restore_rebalance(values: dict[str, Any]) -> Rebalance:
    """A rebalance of what JSON made of it, which has no tuples."""
    moves = tuple(tuple(move) for move in values.pop("moves", ()))
    return Rebalance(**values, moves=moves)


def _restore(facts: dict[str, Any], arrays: dict[str, Any]) -> RunRecord:
    variants = {
        name: VariantRecord(
            **{key: arrays[f"{name}.{key}"] for key in VARIANT_ARRAYS},
            **{
                **fields,
                "rebalances": tuple(map(restore_rebalance, fields["rebalances"])),
            },
        )
        for name, fields in facts.pop("variants").items()
    }
    tuples: dict[str, Any] = {
        key: tuple(facts.pop(key)) for key in ("phases", "switch_steps", "prompts", "continuations")
    }
    # Runs that were recorded before spans were have none.
    tuples["spans"] = tuple(RecordedSpan(**span) for span in facts.pop("spans", ()))
    tuples["levels"] = tuple(ImbalanceSample(**level) for level in facts.pop("levels", ()))
    return RunRecord(
        variants=variants, **tuples, **{name: arrays[name] for name in ARRAYS}, **facts
    )
