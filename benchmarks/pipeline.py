"""Does handing activations over cost a pipeline anything? Stages on an emulated device."""

import sys

from handovers import HANDOVERS
from link_loopback import loopback
from link_tun import tun
from pipeline_crew import Run, serve_all
from pipeline_emulation import LINK, WARM, Point
from pipeline_work import Steady


def main() -> None:
    """Do what the command line says."""
    work = Steady(Point(4096, 256, 0.75))
    runs = [Run(work, system, turn) for turn in range(3) for system in HANDOVERS]
    with tun(2, LINK) if sys.argv[1:] else loopback() as link:
        told = serve_all(link, 2, runs, 60.0)
    sys.stdout.write(f"{told.link}\n")
    for ranks in told.runs:
        last = ranks[-1]
        ended = last["ended"][WARM:]
        rate = (len(ended) - 1) / (ended[-1] - ended[0])
        bound, wrong = 1.0 / last["compute"], [r["wrong"] for r in ranks]
        sys.stdout.write(f"{last['system']:12} {rate:.1f}/s of {bound:.1f}, wrong {wrong}\n")


if __name__ == "__main__":
    main()
