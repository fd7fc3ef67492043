"""vLLM's own client, with our part in it, without engines: its books, its messages, its outputs."""

import pytest
from vllm_cpu.client_scenarios import PLAYS, perform

# What vLLM imports warns of what will be deprecated.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("play", PLAYS)
def test_vllm_client_scenario_with_routing_policy(play: str) -> None:
    perform(play)


def test_compatibility_check_passes_before_and_after_patching() -> None:
    from equipoise.integrations.vllm import compatibility

    compatibility.check_supported(["dp_load_balancer"])
    perform("held")
    compatibility.check_supported(["dp_load_balancer"])
