"""Any accelerator that torch drives, through what torch gives for every one of them.

A family of backends: `accelerator:npu`, `accelerator:cuda`, or `accelerator:` for the one that is
here. It is made to judge a vendor's library by the conformance suite, not to serve with.
"""

from equipoise.backends.torch_accelerator.accelerator import TorchBackend


def family(device_type: str) -> TorchBackend:
    """The entry point `equipoise.accelerator_families: accelerator`.

    Args:
        device_type: torch's name of the kind of device; empty for the one that torch has here.
    """
    return TorchBackend(device_type)


__all__ = ["family"]
