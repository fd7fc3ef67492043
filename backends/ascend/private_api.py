"""All undocumented names of torch_npu that are in use, in one place.

They may change with any version. `probe` looks for all of them before anything is opened, so that a
version which lacks one is refused with its name, and does not fail in the middle of a run.
Written for torch_npu 2.13; 2.14 has the same names.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import reduce
from importlib import import_module
from typing import Any

import torch

MODULE = "torch_npu"
GROUP = "_C._distributed_c10d.ProcessGroupHCCL"
NAMES = (
    "_C._npu_getLocalDevice",
    "_C._construct_storage_from_data_pointer",
    "npu._subscribe_report",
    "npu._launch_host_func",
    f"{GROUP}.get_coll_stream_id",
    f"{GROUP}.shutdown",
    f"{GROUP}.Options._timeout",
    f"{GROUP}.Options.op_timeout",
    f"{GROUP}.Options.global_ranks_in_group",
    f"{GROUP}.Options.group_id",
    f"{GROUP}.Options.hccl_config",
)
"""Paths of the names, from the module on."""


def missing() -> tuple[str, ...]:
    """Which of the names the installed torch_npu lacks. Raises what its import raises."""
    module = import_module(MODULE)
    return tuple(name for name in NAMES if not _has(module, name))


def local_device() -> int:
    """The device that the calling thread was given; -1 where it has none. Makes no context."""
    return int(_core()._npu_getLocalDevice())


def storage_at(address: int, device: torch.device, nbytes: int) -> Any:
    """A storage in plain format over memory that another storage owns."""
    return _core()._construct_storage_from_data_pointer(address, device, nbytes)


def subscribe(stream: Any) -> None:
    """Give a stream a thread that runs its callbacks; once a stream."""
    import_module(MODULE).npu._subscribe_report(stream)


def launch_host_function(stream: Any, function: Callable[[Any], None], argument: object) -> None:
    """Have the stream call a function of the host in its turn; torch_npu keeps both for ever."""
    import_module(MODULE).npu._launch_host_func(stream, function, argument)


def make_process_group(
    store: Any, rank: int, ranks: Sequence[int], name: str, buffer: int, timeout: timedelta
) -> Any:
    """A process group over HCCL by itself, without torch_npu's watchdog.

    It is shut down at once, which ends that thread and nothing else. Later a shutdown would wait
    for what is under way, for ever.

    Args:
        store: introduces the members.
        rank: this rank's place among them.
        ranks: the members. Named even where they are all: a group that names none becomes the
            process's global one.
        name: no other group of the process has it.
        buffer: MiB of each of the communicator's two.
        timeout: of the watchdog, and of each operation.
    """
    kind = _attribute(import_module(MODULE), GROUP)
    options = kind.Options()
    options._timeout = timeout
    options.op_timeout = timeout
    options.global_ranks_in_group = list(ranks)
    options.group_id = name
    options.hccl_config = {"hccl_buffer_size": buffer}
    group = kind(store, rank, len(ranks), options)
    group.shutdown()
    return group


def stream_of(group: Any, device: Any) -> int:
    """The number of the stream that a process group runs on, once it has run anything."""
    return int(group.get_coll_stream_id(device))


def _core() -> Any:
    return import_module(MODULE)._C


def _has(module: Any, name: str) -> bool:
    try:
        _attribute(module, name)
    except AttributeError:
        return False
    return True


def _attribute(module: Any, name: str) -> Any:
    return reduce(getattr, name.split("."), module)
