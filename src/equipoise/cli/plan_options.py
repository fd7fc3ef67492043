"""The options of `equipoise plan`: each is a flag and a key of the configuration file."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from equipoise.balancer.experts.config import SIGMA, SIGMA_WINDOWS, default_sigma
from equipoise.balancer.formats.names import PLACEMENTS
from equipoise.cli import kinds
from equipoise.cli.options import Option

SHAPE, AIM, SPARING, OUTPUT = "shape", "what to plan for", "what may move", "output"

OPTIONS = (
    Option(key="ranks", kind=kinds.WHOLE, group=SHAPE, metavar="N",
           shown_default="those of --installed", help="ranks that serve"),
    Option(key="slots", kind=kinds.WHOLE, group=SHAPE, metavar="N",
           shown_default="those of --installed",
           help="physical experts per layer over all ranks, a multiple of them"),
    Option(key="nodes", kind=kinds.WHOLE, group=SHAPE, metavar="N", shown_default="1",
           help="machines, of as many ranks each"),
    Option(key="policy", kind=kinds.POLICY, group=AIM, metavar="|".join(kinds.POLICIES),
           shown_default="incremental",
           help="greedy: the public rule; connected: so that shares can level any batch; "
           "incremental: from what is installed, moving as little as can be"),
    Option(key="objective", kind=kinds.OBJECTIVE, group=AIM, metavar="|".join(kinds.OBJECTIVES),
           shown_default="tokens",
           help="what is to be equal on all ranks: rows, or experts that have any in a batch, as "
           "decoding waits for where memory bounds it; windows of the statistics are batches then"),
    Option(key="capacities", kind=kinds.NUMBERS, group=AIM, metavar="X,X,...|FILE",
           shown_default="equal ones",
           help="how much each rank can take, in any unit, one number for each; greedy places as "
           "if they were equal"),
    Option(key="split", kind=kinds.SPLIT, group=AIM, metavar="|".join(kinds.SPLITS),
           shown_default="level",
           help="how an expert's rows are divided among its copies: by shares that level the "
           "ranks, or even for engines that know no shares"),
    Option(key="survive", kind=kinds.WHOLE, group=AIM, metavar="0|1|2", shown_default="0",
           help="what no expert may be lost with: 0 nothing, 1 any one rank, 2 any one node"),
    Option(key="sigma", kind=kinds.REAL, group=AIM, metavar="Z",
           shown_default=f"{SIGMA:g} for tokens where STATS have {SIGMA_WINDOWS} or more windows, "
           "else 0",
           help="a rank counts with its mean load and so many standard deviations of it over the "
           "windows, so that experts that are busy together are kept apart; 0: with the sum alone, "
           "as greedy always does"),
    Option(key="threads", kind=kinds.WHOLE, group=AIM, metavar="N", shown_default="1",
           help="over layers; the plan is the same with any number"),
    Option(key="installed", kind=kinds.PATH, group=SPARING, metavar="FILE", shown_default="none",
           help="placement that runs now, in any format"),
    Option(key="target", kind=kinds.REAL, group=SPARING, metavar="X", shown_default="0.02",
           help="imbalance, max/mean - 1 of the ranks, that incremental is content with"),
    Option(key="slack", kind=kinds.REAL, group=SPARING, metavar="X", shown_default="0.1",
           help="room that incremental keeps on each rank for shares, as part of the mean"),
    Option(key="max_copies", kind=kinds.WHOLE, group=SPARING, metavar="N", shown_default="no limit",
           help="copies that may move, over all layers; needs --installed"),
    Option(key="byte_budget", kind=kinds.BYTES, group=SPARING, metavar="SIZE",
           shown_default="no limit",
           help="weights that may move, over all layers and ranks, such as 1.5GiB; needs "
           "--installed and --expert-bytes"),
    Option(key="expert_bytes", kind=kinds.BYTES, group=SPARING, metavar="SIZE",
           shown_default="unknown", help="weights of one expert in one layer, such as 44M"),
    Option(key="node_cost", kind=kinds.REAL, group=SPARING, metavar="X", shown_default="1",
           help="what a copy from another node costs incremental, in copies within one"),
    Option(key="out", short="-o", kind=kinds.PATH, group=OUTPUT, metavar="FILE",
           shown_default="none: has to be given", help="write the placement there"),
    Option(key="format", kind=kinds.NAME, group=OUTPUT, metavar="NAME",
           shown_default="as the suffix says, .json is equipoise",
           help=f"format of the placement: {', '.join(PLACEMENTS)}"),
    Option(key="json", kind=kinds.PATH, group=OUTPUT, metavar="FILE", shown_default="none",
           help="write the figures there"),
    Option(key="quiet", kind=kinds.SWITCH, group=OUTPUT, shown_default="off",
           help="no names of written files, only the table"),
)  # fmt: skip
BY_KEY: Mapping[str, Option] = {option.key: option for option in OPTIONS}


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What one `equipoise plan` was asked for; `progress` is `shown` or `hidden`.

    `sigma` is None where nobody said it: see `sigma_for`.
    """

    statistics: Path
    ranks: int | None = None
    slots: int | None = None
    nodes: int = 1
    policy: str = "incremental"
    objective: str = "tokens"
    capacities: tuple[float, ...] | Path | None = None
    split: str = "level"
    survive: int = 0
    sigma: float | None = None
    installed: Path | None = None
    target: float = 0.02
    slack: float = 0.1
    max_copies: int | None = None
    byte_budget: int | None = None
    expert_bytes: int | None = None
    node_cost: float = 1.0
    threads: int = 1
    out: Path | None = None
    format: str | None = None
    json: Path | None = None
    progress: str = "shown"

    def sigma_for(self, windows: int) -> float:
        """What was asked for, or what suits so many windows of statistics."""
        if self.sigma is not None:
            return self.sigma
        return default_sigma(windows, self.policy, self.objective)
