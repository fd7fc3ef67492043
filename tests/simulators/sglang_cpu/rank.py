"""A rank that has SGLang: imported once, in the process that all ranks are forked from."""

import os
from importlib import import_module

from sglang_cpu import stand_ins

stand_ins.install()
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
import_module("sglang_cpu.eplb_manager")


def main() -> None:
    """Serve as a rank."""
    import_module("helpers.processes.rank_process").main()


if __name__ == "__main__":
    main()
