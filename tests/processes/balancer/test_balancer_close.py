"""What a closed balancer leaves behind: nothing."""

import pytest
from helpers.processes.rank_pool import Ranks
from helpers.rank_programs import balancer_close as closing

RESOURCES = ("threads", "descriptors", "mappings of shared memory")


@pytest.mark.parametrize(
    ("shares", "static"), [("static", False), ("lagged", False), ("exact", False), ("static", True)]
)
def test_balancer_close_leaves_no_threads_descriptors_or_mappings(
    ranks: Ranks, shares: str, static: bool
) -> None:
    records = ranks.run(closing.over_and_over, 2, times=4, shares=shares, static=static)
    for record in records:
        assert {what: record["after"][what] for what in RESOURCES} == {
            what: record["before"][what] for what in RESOURCES
        }
        assert [sum(rows) for rows in record["routed"]] == [len(closing.IDS)] * 6


def test_communicator_closed_in_flight_frees_resources_afterwards(
    ranks: Ranks,
) -> None:
    for record in ranks.run(closing.leave_a_receive, 2, deadline=4.0, seconds=30.0):
        assert {what: record["after"][what] for what in RESOURCES} == {
            what: record["before"][what] for what in RESOURCES
        }
