"""Some ranks of a run, seen as a run of their own."""

from helpers.processes.rank_pool import Ranks
from helpers.rank_programs import grouping

from equipoise.backends.virtual.backend import VirtualBackend
from equipoise.hal.communicator import Communicator, Fabric
from equipoise.hal.control_plane import ControlPlane
from equipoise.hal.subgroup import SubgroupFabric


def test_group_fabrics_answer_same_question_separately(ranks: Ranks) -> None:
    answers = ranks.run(grouping.two_groups, 4)
    for rank, answer in enumerate(answers):
        group = [rank % 2 + 2, rank % 2]
        here = group.index(rank)
        assert answer["place"] == [here, 2, here, 1 - here]
        assert answer["ballots"] == [str(member) for member in group]
        assert answer["first"] == [str(group[0])]
        assert answer["decided"] == str(rank % 2)
        assert answer["sums"] == [3, 3]
        assert answer["gathered"] == group[::-1]
        assert answer["closed"] == "CommunicatorFailed"
        assert answer["still"] == 4


def test_group_forget_does_not_affect_other_groups(ranks: Ranks) -> None:
    zero, one = ranks.run(grouping.forgotten, 2)
    assert zero == ["BallotIncomplete", ["the run's"] * 2]
    assert one == ["", ["the run's"] * 2]


def test_group_fabric_refuses_invalid_ranks(ranks: Ranks) -> None:
    assert ranks.run(grouping.misnamed, 2) == [["Unsupported"] * 4] * 2


def test_group_fabric_implements_fabric_protocols() -> None:
    world = VirtualBackend().world(2, b"")
    group = SubgroupFabric(world.fabric(1), "alone", [1])
    assert isinstance(group, Fabric)
    assert isinstance(group.control, ControlPlane)
    assert isinstance(group.open("sum"), Communicator)
    assert (group.control.rank, group.control.size) == (0, 1)
    world.close()
