"""The client of the vLLM that vllm-ascend 0.23 is made for, which reports less than a later one."""

from collections.abc import Callable
from typing import Any

import pytest
from vllm_cpu.client_scenarios import PLAYS

pytestmark = pytest.mark.timeout(900)
Play = Callable[..., list[Any]]


@pytest.mark.parametrize("name", PLAYS)
def test_vllm_023_client_scenario_with_routing_policy(play: Play, name: str) -> None:
    assert play("clients:played", 1, play=name) == [[]]
