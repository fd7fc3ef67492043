"""What a run measured: the one object that tables, pictures and JSON are made from."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from equipoise.balancer.observe.spans import Level, Traced
from equipoise.demo.told import Told

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """One rebalance: closed its load window before `planned_at`, took effect before `step`."""

    number: int
    planned_at: int
    step: int
    outcome: str
    """`committed`, `unchanged`, or the reason of the abort."""
    slots_moved: int
    """Copies that the receiving ranks did not hold; 0 where only shares changed."""
    bytes_moved: int
    seconds: dict[str, float] = field(default_factory=dict)
    """By phase, on rank 0."""
    before: float | None = None
    """Imbalance, under the load planned on, of what was installed; None where no plan was made."""
    predicted: float | None = None
    """The same of the plan."""
    actual: float | None = None
    """In the first sub-window behind it; None where it was not seen."""


@dataclass(frozen=True, kw_only=True)
class VariantRecord:
    """The same traffic served once; `name` is `unbalanced`, `placement` or a share mode."""

    name: str
    rank_rows: Counts
    """(steps, layers, ranks): rows, one per (token, k), that each rank's experts computed."""
    step_seconds: npt.NDArray[np.float64]
    """(steps,): wall seconds of a step, the slowest rank's."""
    epochs: tuple[Epoch, ...]
    aborts: dict[str, int]
    """Aborted epochs by reason."""
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
    engine: Told = field(default_factory=dict)
    """What the engine was told, by option; empty without one, and in records of before."""
    prompts: tuple[str, ...] = ()
    """A sample prompt of each phase."""
    continuations: tuple[str, ...] = ()
    """What the model wrote after it."""
    spans: tuple[Traced, ...] = ()
    """What every rank did when, in the variant that the run is about."""
    levels: tuple[Level, ...] = ()
    """The imbalance that rank 0 saw meanwhile."""
    machine: dict[str, str] = field(default_factory=dict)
    """Processor, cores, operating system, versions of Python, torch and numpy."""
