"""`StageTransport`: what the worker's calls come to, and what of them is refused.

The modes that run both stages are in `test_handover_runs.py` and `test_handover.py`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from helpers.processes.thread_control_plane import ThreadControl, meet
from helpers.watchdog import WATCHDOG
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from equipoise.hal.errors import IntegrationError
from equipoise.hal.stream import Stream
from equipoise.integrations.vllm.pp import transport as transport_module
from equipoise.integrations.vllm.pp.transport import (
    StageLinks,
    StageTransport,
    StreamOrderedHandle,
    _open_slice_group,
    _wrap_worker,
    open_stage_links,
    step_template,
)
from equipoise.pipeline.channel.schema import SchemaTemplate, SliceMode

MAX_ROWS = 16
HIDDEN = {"hidden": torch.zeros(MAX_ROWS, 4), "residual": torch.zeros(MAX_ROWS, 4)}


class Sections:
    """Streams that count ordered sections, and know whether one is open."""

    compute_stream = cast(Stream, None)

    def __init__(self) -> None:
        self.open = self.count = 0

    @contextmanager
    def ordered_section(self) -> Iterator[None]:
        self.open += 1
        self.count += 1
        yield
        self.open -= 1

    def launch_in_forward(self, program: Any) -> None:
        raise AssertionError("nothing here is a part of the forward")


class Handle:
    """Handle of a message that is pending until `wait`."""

    def __init__(self, sections: Sections) -> None:
        self._sections = sections
        self.within: list[int] = []

    def is_completed(self) -> bool:
        return bool(self.within)

    def wait(self) -> None:
        self.within.append(self._sections.open)


class Channel:
    """Stands in for both ends; records calls, and how many sections were open."""

    def __init__(self, sections: Sections) -> None:
        self._sections = sections
        self.calls: list[tuple[Any, ...]] = []
        self.handle = Handle(sections)

    def send(self, tensors: dict[str, Tensor]) -> None:
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self.calls.append((self._sections.open, "send", shapes))

    def expect(self, rows: int) -> None:
        self.calls.append((self._sections.open, "expect", rows))

    def take(self, rows: int) -> tuple[dict[str, Tensor], Handle]:
        self.calls.append((self._sections.open, "take", rows))
        return HIDDEN, self.handle

    def close(self) -> None:
        self.calls.append((self._sections.open, "close"))


def transport(
    slices: int = 1, first: bool = False, last: bool = False
) -> tuple[StageTransport, Channel, Sections]:
    """One whose channels were opened."""
    sections = Sections()
    channel: Any = Channel(sections)
    links = StageLinks(MAX_ROWS, None if first else channel, None if last else channel, slices)
    stage = StageTransport(lambda: links, sections)
    stage.open()
    return stage, channel, sections


def group(ranks: int) -> Any:
    """A tensor-parallel group of vLLM's."""
    return SimpleNamespace(world_size=ranks)


@given(st.integers(1, MAX_ROWS), st.integers(1, 4))
def test_transport_sends_rows_of_the_step_and_completes_at_once(rows: int, slices: int) -> None:
    stage, channel, sections = transport(slices)
    with stage.step(rows):
        handles: list[Any] = stage.isend_tensor_dict(HIDDEN, all_gather_group=group(slices))
    shapes = {"hidden": (rows, 4), "residual": (rows, 4)}
    assert channel.calls == [(1, "send", shapes)]
    assert (sections.count, sections.open) == (1, 0)
    assert len(handles) == 2, "a worker may skip the first"
    assert all(handle.is_completed() for handle in handles)
    for handle in handles:
        handle.wait()
    assert sections.count == 1, "an engine waits for handles, and must not wait for the next stage"


@given(st.integers(1, MAX_ROWS))
def test_transport_expects_rows_of_the_step_and_hands_out_those_of_the_largest(rows: int) -> None:
    stage, channel, sections = transport()
    with stage.step(rows):
        tensors, [handle], postprocess = stage.irecv_tensor_dict(all_gather_group=group(1))
    assert channel.calls == [(1, "expect", rows), (1, "take", MAX_ROWS)]
    assert (tensors is HIDDEN, postprocess, sections.count) == (True, [], 1)
    assert not cast(Any, handle).is_completed()
    handle.wait()
    assert cast(Any, handle).is_completed()
    assert (channel.handle.within, sections.count, sections.open) == ([1], 2, 0)


Call = Callable[[StageTransport], object]
CALLS: dict[str, tuple[Call, str]] = {
    "to a stage of its choice": (
        lambda stage: stage.isend_tensor_dict(HIDDEN, dst=0, all_gather_group=group(2)),
        "a stage of its choice",
    ),
    "without slices": (lambda stage: stage.isend_tensor_dict(HIDDEN), "slices among 1 of 2"),
    "some whole": (
        lambda stage: stage.irecv_tensor_dict(
            all_gather_group=group(2), all_gather_tensors={"residual": False}
        ),
        "whole tensors beside slices",
    ),
    "too few rows": (
        lambda stage: stage.isend_tensor_dict(
            {**HIDDEN, "residual": torch.zeros(3, 4)}, all_gather_group=group(2)
        ),
        "residual: fewer rows than the 8",
    ),
}


@pytest.mark.parametrize(("call", "text"), CALLS.values(), ids=CALLS)
def test_transport_refuses_what_it_cannot_hand_over(call: Call, text: str) -> None:
    stage, channel, _ = transport(slices=2)
    with stage.step(8), pytest.raises(IntegrationError, match=text):
        call(stage)
    assert channel.calls == []


def test_transport_refuses_calls_outside_of_a_step() -> None:
    stage, _, _ = transport()
    for call in (lambda: stage.isend_tensor_dict(HIDDEN), stage.irecv_tensor_dict):
        with pytest.raises(IntegrationError, match="outside of the worker's execute_model"):
            call()


def test_transport_of_outer_stages_names_the_missing_neighbour() -> None:
    for outer, text in (({"last": True}, "send to"), ({"first": True}, "receive from")):
        stage, _, _ = transport(**outer)
        with stage.step(1), pytest.raises(IntegrationError, match=f"nobody to {text}"):
            stage.isend_tensor_dict(HIDDEN) if "last" in outer else stage.irecv_tensor_dict()


def test_awaited_handle_without_query_is_not_completed() -> None:
    assert not StreamOrderedHandle(cast(Any, SimpleNamespace(wait=len)), Sections()).is_completed()


def worker_of(**shapes: tuple[Any, ...]) -> Any:
    """A worker whose model takes tensors of these shapes, "rows" standing for the rows."""

    def make_empty_intermediate_tensors(batch_size: int, dtype: Any, device: Any) -> Any:
        return {
            name: torch.zeros(
                [batch_size if size == "rows" else size for size in shape if size != "float32"],
                dtype=torch.float32 if "float32" in shape else dtype,
                device=device,
            )
            for name, shape in shapes.items()
        }

    model = SimpleNamespace(make_empty_intermediate_tensors=make_empty_intermediate_tensors)
    return SimpleNamespace(
        get_model=lambda: model,
        model_config=SimpleNamespace(dtype=torch.bfloat16),
        model_runner=SimpleNamespace(max_num_tokens=MAX_ROWS),
    )


def test_step_template_slices_what_can_be_divided_at_any_size() -> None:
    template = step_template(worker_of(hidden=("rows", 4), odd=("rows", 3)), slices=2)
    modes = [(f.name, f.row_shape, f.dtype, f.slice_mode) for f in template.fields]
    assert modes == [
        ("hidden", (4,), torch.bfloat16, SliceMode.SLICED),
        ("odd", (3,), torch.bfloat16, SliceMode.WHOLE),
    ]
    assert template.max_rows == MAX_ROWS
    whole = step_template(worker_of(hidden=("rows", 4)), slices=1)
    assert [field.slice_mode for field in whole.fields] == [SliceMode.WHOLE]


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        ({"hidden": ("rows", 4), "table": (7, 4)}, r"table with shape \[7, 4\] for 3 tokens"),
        ({"hidden": ("rows", 4), "sum": ("rows", 4, "float32")}, "bfloat16 and torch.float32"),
        ({}, "no dtype"),
    ],
)
def test_step_template_refuses_other_models(shapes: dict[str, Any], text: str) -> None:
    with pytest.raises(IntegrationError, match=text):
        step_template(worker_of(**shapes), slices=1)


def test_stages_agree_on_what_the_later_model_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a model hands over may depend on the stage: the source's own is not asked for."""
    opened: dict[tuple[int, str], SchemaTemplate] = {}

    def opening(kind: str) -> Any:
        def open_end(spec: Any, context: Any) -> str:
            opened[context.fabric.control.rank, kind] = spec.template
            return kind

        return open_end

    for kind in ("sender", "receiver"):
        monkeypatch.setattr(transport_module, f"open_{kind}", opening(kind))

    def program(control: ThreadControl) -> object:
        shapes = {f"aux{n}": ("rows", 4) for n in range(control.rank)}
        worker = worker_of(hidden=("rows", 4), **shapes)
        worker.vllm_config = SimpleNamespace(max_concurrent_batches=3)
        context: Any = SimpleNamespace(
            fabric=SimpleNamespace(control=control), slice_group=None, deadline=WATCHDOG
        )
        links = open_stage_links(worker, [0, 1, 2], context)
        return links.from_previous, links.to_next

    assert meet(3, program) == [(None, "sender"), ("receiver", "sender"), ("receiver", None)]
    for stage in (0, 1):
        sent, received = opened[stage, "sender"], opened[stage + 1, "receiver"]
        assert sent == received
        assert [field.name for field in sent.fields] == ["hidden", "aux0", "aux1"][: stage + 2]


def test_stages_both_refuse_what_the_later_model_takes() -> None:
    def program(control: ThreadControl) -> object:
        worker = worker_of(hidden=("rows", 4), **({"table": (7, 4)} if control.rank else {}))
        context: Any = SimpleNamespace(
            fabric=SimpleNamespace(control=control), slice_group=None, deadline=WATCHDOG
        )
        return open_stage_links(worker, [0, 1], context)

    for answer in meet(2, program):
        assert isinstance(answer, IntegrationError)
        assert "table with shape [7, 4]" in str(answer)


class Worker:
    """A worker and its runner; its methods record what they are called with."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.model_runner = self

    def profile_run(self, randomize_inputs: bool = False) -> None:
        self.calls.append(("profile", randomize_inputs))

    def execute_model(self, scheduler_output: Any) -> Any:
        self.calls.append(scheduler_output.total_num_scheduled_tokens)
        return self.calls[-1]


def test_transport_opens_in_profiling_run_and_knows_rows_in_each_step() -> None:
    opened: list[StageLinks] = []
    sections = Sections()
    channel: Any = Channel(sections)

    def open_links() -> StageLinks:
        opened.append(StageLinks(MAX_ROWS, channel, channel, 1))
        return opened[-1]

    worker, stage = Worker(), StageTransport(open_links, sections)
    with _wrap_worker(worker, stage):
        assert not opened
        worker.profile_run(randomize_inputs=True)
        assert len(opened) == 1
        for rows in (3, 0, 5):
            step = SimpleNamespace(total_num_scheduled_tokens=rows)
            assert worker.execute_model(step) == rows
        assert len(opened) == 1
    assert worker.calls == [("profile", True), 3, 0, 5]
    assert "execute_model" not in vars(worker)
    assert "profile_run" not in vars(worker)


def test_transport_forgets_rows_of_a_step_that_failed() -> None:
    stage, _, _ = transport()
    with pytest.raises(ZeroDivisionError), stage.step(3):
        raise ZeroDivisionError
    with pytest.raises(IntegrationError, match="outside"):
        stage.irecv_tensor_dict()


@pytest.mark.parametrize(("ranks", "group_count"), [([3], 0), ([2, 3], 2), ([4, 5, 6, 7], 2)])
def test_handover_slices_need_several_ranks_in_a_stage(ranks: list[int], group_count: int) -> None:
    groups: list[tuple[str, list[int]]] = []

    def communicator(name: str, among: list[int]) -> Any:
        groups.append((name, among))
        return SimpleNamespace(name=name)

    context: Any = SimpleNamespace(fabric=SimpleNamespace(open=communicator))
    slice_group: Any = _open_slice_group(context, ranks)
    assert len({name for name, _ in groups}) == group_count
    assert all(among == ranks for _, among in groups)
    assert (slice_group is None) == (group_count == 0)
    if slice_group is not None:
        assert slice_group.gather_communicator is not slice_group.verify_communicator
