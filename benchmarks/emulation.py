"""Every constant of the emulated device, link and traffic that `engine.py` measures on.

Where they come from:

- A step takes 60 to 80 ms where stop-the-world was published, and an expert of such a model is
  44 MB in 8 bits. Eight layers are emulated; each stands for four, which compute one after the
  other and whose experts travel together: a step here takes 80 to 90 ms.
- A stop-the-world rebalance of it was published as 0.91 s, in which each of 32 ranks receives some
  22 GB: 24 GB/s a rank. So the link is that of a card of 200 Gbit/s; half and double beside it.
- A copy within the device reads and writes: half of 4.8 TB/s, less a fifth.
- Host memory comes over a link between chips (200 GB/s a device); it is swept along with the link.
"""

from dataclasses import asdict, dataclass, replace

RANKS, LAYERS, EXPERTS, SLOTS = 4, 8, 64, 80
SEED = 0

WINDOW = 4
"""Steps of load that a plan is made from; one sub-window."""
INTERVAL = 36
"""Steps between two plans."""
EPOCHS = 3
"""Plans of a load stage: one that follows the switch of topic, then some made anew. So a topic
lasts 108 steps, about nine seconds."""
FOLLOWING, ANEW = 128, 256
"""Copies that a plan may move, of 640 slots: where the topic has switched, and where it has not."""
ROWS = (768, 1024, 1280)
"""Rows, one per (token, k), of a rank, step and layer, by load stage."""

GROUP = 4
"""Layers that an emulated one stands for."""
SLOT_BYTES = 44e6 * GROUP
"""Of an emulated slot. What really moves is two numbers: its layer and its expert."""
PARCEL = 16
"""Slots of a blob at most."""
UPDATES = 1
"""Layers that the locked path rewrites a step."""


@dataclass(frozen=True)
class Point:
    """What is swept.

    Attributes:
        name: for tables.
        stages: load stages that are run.
        row: seconds of compute a row.
        fixed: seconds of a layer beside that: attention, launches, both exchanges.
        latency: seconds of a transfer beside its bytes.
        link: bytes per second of a rank's link to its peers, each direction.
        host: bytes per second from the host's memory.
        hbm: bytes per second of copies within a device.
        skew: sigma of the logarithm of an expert's popularity.
    """

    name: str = "centre"
    stages: int = 2
    row: float = 1.5e-6 * GROUP
    fixed: float = 1.2e-3 * GROUP
    latency: float = 20e-6
    link: float = 25e9
    host: float = 200e9
    hbm: float = 2e12
    skew: float = 1.12

    def fields(self) -> dict[str, float | str]:
        """For JSON."""
        return asdict(self)

    def slower(self, times: float) -> "Point":
        """A device and links so many times slower: what the host does weighs less beside them."""
        return replace(
            self,
            row=self.row * times,
            fixed=self.fixed * times,
            link=self.link / times,
            host=self.host / times,
            hbm=self.hbm / times,
        )


CENTRE = Point()
SWEPT = 1
"""Load stages of the points around the centre."""


def points() -> tuple[Point, ...]:
    """The centre, then one constant at a time at half and at double, or less and more skewed."""
    around = {
        "half the wait per row": {"row": CENTRE.row / 2},
        "twice the wait per row": {"row": CENTRE.row * 2},
        "half the link": {"link": CENTRE.link / 2, "host": CENTRE.host / 2},
        "twice the link": {"link": CENTRE.link * 2, "host": CENTRE.host * 2},
        "less skew": {"skew": 0.8},
        "more skew": {"skew": 1.4},
    }
    others = (replace(CENTRE, name=n, stages=SWEPT, **change) for n, change in around.items())
    return (CENTRE, *others)


def raw(point: Point) -> Point:
    """The same without emulation: nothing is waited for but what this machine really does."""
    free = float("inf")
    nothing = {"row": 0.0, "fixed": 0.0, "latency": 0.0}
    return replace(point, name="raw", **nothing, link=free, host=free, hbm=free)
