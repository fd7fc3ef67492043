"""The options of `equipoise advise`: each is a flag and a key of the configuration file."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from equipoise.cli import kinds
from equipoise.cli.options import Option

SHAPE, MODEL, MACHINE, OUTPUT = "what serves", "what an expert is", "what it runs on", "output"

OPTIONS = (
    Option(key="ranks", kind=kinds.WHOLE, group=SHAPE, metavar="N",
           shown_default="those of --installed", help="ranks that serve"),
    Option(key="slots", kind=kinds.WHOLE, group=SHAPE, metavar="N",
           shown_default="those of --installed, or as many as are advised",
           help="physical experts per layer over all ranks, a multiple of them"),
    Option(key="installed", kind=kinds.PATH, group=SHAPE, metavar="FILE",
           shown_default="experts in their order, one copy each",
           help="placement that runs now, in any format"),
    Option(key="target", kind=kinds.REAL, group=SHAPE, metavar="X", shown_default="0.02",
           help="imbalance, max/mean - 1 of the ranks, that is good enough"),
    Option(key="step_rows", kind=kinds.WHOLE, group=SHAPE, metavar="N",
           shown_default="those of a window",
           help="rows of a layer in a step, over all ranks: tokens times experts of a token"),
    Option(key="expert_bytes", kind=kinds.BYTES, group=MODEL, metavar="SIZE",
           shown_default="unknown", help="weights of one expert in one layer, such as 24MiB"),
    Option(key="hidden", kind=kinds.WHOLE, group=MODEL, metavar="N", shown_default="unknown",
           help="width of the model; with --intermediate it says what an expert weighs"),
    Option(key="intermediate", kind=kinds.WHOLE, group=MODEL, metavar="N", shown_default="unknown",
           help="width within an expert, which is three matrices of both widths"),
    Option(key="precision", kind=kinds.PRECISION, group=MODEL, metavar="|".join(kinds.PRECISIONS),
           shown_default="fp8", help="of the weights, and of the products"),
    Option(key="hardware", kind=kinds.NAME, group=MACHINE, metavar="NAME|FILE",
           shown_default="unknown", help="what a rank is: a name of the table that ships, or YAML "
           "or JSON with the same keys; needs what an expert weighs"),
    Option(key="itl", kind=kinds.REAL, group=MACHINE, metavar="MS", shown_default="none",
           help="inter-token latency to keep, in ms: also how long a step is; needs --hardware"),
    Option(key="link", kind=kinds.LINK, group=MACHINE, metavar="|".join(kinds.LINKS),
           shown_default="node", help="what weights come over: within a node, between nodes, or "
           "from the host's memory"),
    Option(key="memory_share", kind=kinds.REAL, group=MACHINE, metavar="X", shown_default="0.8",
           help="part of a device's memory that experts may take"),
    Option(key="moe_share", kind=kinds.REAL, group=MACHINE, metavar="X", shown_default="0.5",
           help="part of --itl that the experts of all layers may take"),
    Option(key="json", kind=kinds.PATH, group=OUTPUT, metavar="FILE", shown_default="none",
           help="write the figures there, with the source of each of the hardware's"),
    Option(key="quiet", kind=kinds.SWITCH, group=OUTPUT, shown_default="off",
           help="no names of written files, only the table"),
)  # fmt: skip
BY_KEY: Mapping[str, Option] = {option.key: option for option in OPTIONS}


@dataclass(frozen=True, kw_only=True)
class AdviseRequest:
    """What one `equipoise advise` was asked for; `progress` is `shown` or `hidden`."""

    statistics: Path
    ranks: int | None = None
    slots: int | None = None
    installed: Path | None = None
    target: float = 0.02
    step_rows: int | None = None
    expert_bytes: int | None = None
    hidden: int | None = None
    intermediate: int | None = None
    precision: str = "fp8"
    hardware: str | None = None
    itl: float | None = None
    link: str = "node"
    memory_share: float = 0.8
    moe_share: float = 0.5
    json: Path | None = None
    progress: str = "shown"
