"""vLLM's own client, with our part in it, without engines: its books, its messages, its outputs."""

import pytest
from vllm_cpu.client_plays import PLAYS, perform

# What vLLM imports warns of what will be deprecated.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("play", PLAYS)
def test_the_client_serves_a_policy_as_it_serves_its_own_rule(play: str) -> None:
    perform(play)


def test_what_is_touched_is_there_before_and_behind() -> None:
    from equipoise.integrations.vllm import compatibility

    compatibility.check(["routing"])
    perform("held")
    compatibility.check(["routing"])
