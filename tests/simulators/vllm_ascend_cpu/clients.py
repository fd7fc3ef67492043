"""A case for a pool of ranks: the client of the vLLM beside vllm-ascend, and our routing in it."""

from vllm_cpu.client_scenarios import perform

from equipoise.hal.communicator import Fabric
from equipoise.integrations.vllm.compatibility import symbol_problems
from equipoise.integrations.vllm_ascend import compatibility
from vllm_ascend_cpu import stand_ins

stand_ins.install()

import vllm_ascend.patch.platform  # noqa: E402, F401 - what it changes in a process without a device


def played(fabric: Fabric, address: str, play: str) -> list[str]:
    """What is not as it must be behind the play, which raises where something else came of it."""
    perform(play)
    return list(symbol_problems(compatibility.FRONT_END_SYMBOLS["dp_load_balancer"]))
