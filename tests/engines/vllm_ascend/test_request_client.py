"""The client of the vLLM that vllm-ascend 0.23 is made for, which reports less than a later one."""

from collections.abc import Callable
from typing import Any

import pytest
from vllm_cpu.client_plays import PLAYS

pytestmark = pytest.mark.timeout(900)
Play = Callable[..., list[Any]]


@pytest.mark.parametrize("name", PLAYS)
def test_the_client_serves_a_policy_as_it_serves_its_own_rule(play: Play, name: str) -> None:
    assert play("clients:played", 1, play=name) == [[]]
