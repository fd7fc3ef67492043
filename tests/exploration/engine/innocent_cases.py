"""Innocent cases: every mutant must survive them, where nothing is late and nothing goes wrong."""

from exploration.engine.case import Cadence, Case
from exploration.engine.oracle import violations
from exploration.engine.patches import Patches
from exploration.engine.run_case import play

from equipoise.balancer.experts.config import ShareMode
from equipoise.balancer.experts.placement import ExpertShape

LOOSE = Case(
    shape=ExpertShape(layers=2, experts=4, slots=6, ranks=2),
    staging=6,
    slots_per_message=4,
    cadence=Cadence(1, 1, 2),
    readers=(0,),
    hot=(0, 2),
)
"""One chunk a rebalance: all layers fit the staging together."""
INNOCENT = (
    LOOSE,
    Case(
        shape=ExpertShape(2, 5, 9, 3),
        staging=6,
        slots_per_message=2,
        shares=ShareMode.LAGGED,
        script=7,
    ),
)


def smoke(patches: Patches) -> dict[str, str]:
    """What the innocent cases break; nothing, unless the mutant cannot even walk."""
    broken_properties: dict[str, str] = {}
    for case in INNOCENT:
        record = play(case, patches)
        assert any(report.copies for report in record.rank_records[0].reports), "nothing moved"
        broken_properties |= violations(record)
    return broken_properties
