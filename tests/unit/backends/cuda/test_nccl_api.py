"""What NCCL is called with, on a library that only writes down what it is told."""

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch

from equipoise.backends.cuda import nccl_api
from equipoise.backends.cuda.nccl_api import (
    ID_BYTES,
    NCCL_DTYPES,
    NcclApi,
    NcclCommHandle,
    NcclConfig,
    NcclError,
    NcclUniqueId,
)

ID = bytes(range(ID_BYTES))
COMM, STREAM, SOURCE, TARGET = 0xC0, 0x57, 0x50, 0x7A
"""Numbers that are told apart."""


class NcclRecorder:
    """Functions of C's own calling convention: what comes through here came through a real call."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.codes: dict[str, int] = {}
        self.number = 22703
        self.async_code = 0
        self.last: Any = ctypes.create_string_buffer(b"no route\n to host")
        for name, parameters in nccl_api._PARAMETERS.items():
            kind = ctypes.CFUNCTYPE(ctypes.c_int, *parameters)
            setattr(self, name, kind(self._recorder(name)))
        messages = [ctypes.create_string_buffer(b"error %d" % code) for code in range(8)]
        self.ncclGetErrorString: Any = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int)(
            lambda code: ctypes.addressof(messages[code])
        )
        self.ncclGetLastError: Any = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(
            lambda comm: None if self.last is None else ctypes.addressof(self.last)
        )

    def _recorder(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            self.calls.append((name, *(self._decode(name, value) for value in arguments)))
            return self.codes.get(name, 0)

        return call

    def _decode(self, name: str, value: Any) -> Any:
        if isinstance(value, NcclUniqueId):
            return ctypes.string_at(ctypes.addressof(value), ID_BYTES)
        if isinstance(value, (int, type(None))):
            return value
        if isinstance(value, ctypes.POINTER(NcclConfig)):
            return {field: getattr(value.contents, field) for field, _ in NcclConfig._fields_}
        if name == "ncclGetUniqueId":
            ctypes.memmove(value, ID, ID_BYTES)
        else:
            answers = {"ncclGetVersion": self.number, "ncclCommGetAsyncError": self.async_code}
            value[0] = answers.get(name, COMM)
        return "out"


@pytest.fixture
def recorder() -> NcclRecorder:
    return NcclRecorder()


@pytest.fixture
def api(recorder: NcclRecorder) -> NcclApi:
    return NcclApi(recorder)


def test_join_passes_whole_unique_id_by_value(api: NcclApi, recorder: NcclRecorder) -> None:
    assert api.unique_id() == ID
    handle = api.join(ID, 4, 3, 8)
    assert handle.value == COMM
    assert recorder.calls[-1][:-1] == ("ncclCommInitRankConfig", "out", 4, ID, 3)


def test_join_asks_for_non_blocking_communicator_of_few_ctas(
    api: NcclApi, recorder: NcclRecorder
) -> None:
    api.join(ID, 4, 3, 8)
    assert recorder.calls[-1][-1] == {
        "size": 40,
        "magic": 0xCAFEBEEF,
        "version": 21700,
        "blocking": 0,
        "cga_cluster_size": -(1 << 31),
        "min_ctas": -(1 << 31),
        "max_ctas": 8,
        "net_name": None,
    }


@pytest.mark.parametrize("name", ["ncclCommInitRankConfig", "ncclAllReduce", "ncclCommFinalize"])
def test_calls_in_progress_are_no_errors(api: NcclApi, recorder: NcclRecorder, name: str) -> None:
    recorder.codes[name] = 7
    handle = api.join(ID, 2, 0, 8)
    api.all_reduce(SOURCE, 1, 0, handle, STREAM)
    api.finalize(handle)
    assert recorder.calls[-1] == ("ncclCommFinalize", COMM)


def test_in_progress_asks_for_state_and_raises_error(api: NcclApi, recorder: NcclRecorder) -> None:
    states = []
    for code in (7, 0):
        recorder.async_code = code
        states.append(api.in_progress(NcclCommHandle(COMM)))
    assert states == [True, False]
    recorder.async_code = 6
    with pytest.raises(NcclError, match=r"error 6 \(no route to host\)"):
        api.in_progress(NcclCommHandle(COMM))


@pytest.mark.parametrize(
    ("number", "version"),
    [(2804, (2, 8, 4)), (21403, (2, 14, 3)), (22703, (2, 27, 3)), (23007, (2, 30, 7))],
)
def test_version_is_decoded_in_both_formats(
    api: NcclApi, recorder: NcclRecorder, number: int, version: tuple[int, ...]
) -> None:
    recorder.number = number
    assert api.version() == version


def test_operations_pass_arguments_in_nccl_order(api: NcclApi, recorder: NcclRecorder) -> None:
    comm = NcclCommHandle(COMM)
    api.all_reduce(SOURCE, 5, NCCL_DTYPES[torch.bfloat16], comm, STREAM)
    api.reduce_scatter(TARGET, SOURCE, 5, NCCL_DTYPES[torch.int64], comm, STREAM)
    api.broadcast(SOURCE, 5, NCCL_DTYPES[torch.int8], 2, comm, STREAM)
    api.all_gather(TARGET, SOURCE, 5, NCCL_DTYPES[torch.int8], comm, STREAM)
    api.send(SOURCE, 5, 1, comm, STREAM)
    api.receive(TARGET, 5, 1, comm, STREAM)
    assert recorder.calls == [
        ("ncclAllReduce", SOURCE, SOURCE, 5, 9, 0, COMM, STREAM),
        ("ncclReduceScatter", SOURCE, TARGET, 5, 4, 0, COMM, STREAM),
        ("ncclBroadcast", SOURCE, SOURCE, 5, 0, 2, COMM, STREAM),
        ("ncclAllGather", SOURCE, TARGET, 5, 0, COMM, STREAM),
        ("ncclSend", SOURCE, 5, 0, 1, COMM, STREAM),
        ("ncclRecv", TARGET, 5, 0, 1, COMM, STREAM),
    ]


def test_send_passes_64_bit_addresses(api: NcclApi, recorder: NcclRecorder) -> None:
    high = (1 << 47) + 1
    api.send(high, 1 << 33, 0, NcclCommHandle(high + 1), high + 2)
    assert recorder.calls == [("ncclSend", high, 1 << 33, 0, 0, high + 1, high + 2)]


def test_error_names_call_and_nccl_message(api: NcclApi, recorder: NcclRecorder) -> None:
    recorder.codes["ncclAllReduce"] = 3
    with pytest.raises(NcclError, match=r"^ncclAllReduce: error 3 \(no route to host\)$"):
        api.all_reduce(SOURCE, 1, 0, NcclCommHandle(COMM), STREAM)
    recorder.last = None
    with pytest.raises(NcclError, match=r"^ncclAllReduce: error 3$"):
        api.all_reduce(SOURCE, 1, 0, NcclCommHandle(COMM), STREAM)


def test_async_error_ignores_operations_in_progress(api: NcclApi, recorder: NcclRecorder) -> None:
    for code, message in ((0, ""), (7, ""), (6, "error 6 (no route to host)")):
        recorder.async_code = code
        assert api.async_error(NcclCommHandle(COMM)) == message


def test_group_wraps_calls_in_start_and_end(api: NcclApi, recorder: NcclRecorder) -> None:
    with api.group(NcclCommHandle(COMM)):
        api.send(SOURCE, 1, 0, NcclCommHandle(COMM), STREAM)
    assert [call[0] for call in recorder.calls] == ["ncclGroupStart", "ncclSend", "ncclGroupEnd"]


def test_group_ends_after_failed_call_and_raises_first_error(
    api: NcclApi, recorder: NcclRecorder
) -> None:
    recorder.codes = {"ncclSend": 4, "ncclGroupEnd": 5}
    with pytest.raises(NcclError, match="ncclSend: error 4"), api.group(NcclCommHandle(COMM)):
        api.send(SOURCE, 1, 0, NcclCommHandle(COMM), STREAM)
    assert recorder.calls[-1] == ("ncclGroupEnd",)


def test_group_launches_nothing_when_python_raises_between_calls(
    api: NcclApi, recorder: NcclRecorder
) -> None:
    """NCCL launches no group in which a call has failed: so one fails before the group ends."""

    def interrupted() -> None:
        with api.group(NcclCommHandle(COMM)):
            api.send(SOURCE, 1, 0, NcclCommHandle(COMM), STREAM)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert recorder.calls[-2:] == [("ncclSend", None, 1, -1, -1, COMM, None), ("ncclGroupEnd",)]


def test_api_refuses_library_without_required_function() -> None:
    class EmptyLibrary:
        """Has nothing."""

    with pytest.raises(AttributeError, match="ncclGetVersion"):
        NcclApi(EmptyLibrary())
