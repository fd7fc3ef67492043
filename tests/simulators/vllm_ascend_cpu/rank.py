"""A rank that has vllm-ascend: imported once, in the process that all ranks are forked from.

The folder of `fetch` comes first on the search path of this process and of those that it starts, so
that its vLLM 0.23 is found in place of the one that is installed. The process of the tests imports
neither.
"""

import os
import sys
from importlib import import_module

from vllm_ascend_cpu.fetch import FOLDER

SETTINGS = {
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_TARGET_DEVICE": "cpu",
}
IMPORTED = "groups", "planners", "compatibility", "stages", "replay_cases"
"""Of `vllm_ascend_cpu`; the first has the stand-ins that vllm-ascend is imported over."""


def _find_vllm_ascend() -> None:
    sys.path.insert(0, str(FOLDER))
    paths = str(FOLDER), os.environ.get("PYTHONPATH", "")
    os.environ.update(SETTINGS, PYTHONPATH=os.pathsep.join(filter(None, paths)))


_find_vllm_ascend()
for _name in IMPORTED:
    import_module(f"vllm_ascend_cpu.{_name}")


def main() -> None:
    """Serve as a rank."""
    import_module("helpers.processes.rank_process").main()


if __name__ == "__main__":
    main()
