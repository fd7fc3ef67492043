"""Expert-parallel libraries: dispatch tokens to the ranks of their experts, and combine results.

The protocol is what NCCL-EP, DeepEP, FlashInfer's `moe_ep`, NIXL-EP and torch_npu's distributed
dispatch have in common, so that one suite judges them all (clauses M1 to M17).
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from equipoise.hal.accelerator import Accelerator
from equipoise.hal.capabilities import Probe
from equipoise.hal.communicator import Fabric
from equipoise.hal.errors import StreamTimeout, Unsupported
from equipoise.hal.stream import Event, Stream

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ExpertParallelCapabilities:
    """What a library can do; what it does not declare is not judged.

    Attributes:
        dtypes: of tokens and results.
        hidden_sizes: row lengths that it takes; empty for any multiple of 8.
        top_ks: choices per token that it takes; empty for 1 to the number of experts.
        group_sizes: numbers of ranks that it takes; empty for any.
        experts_per_rank: numbers of experts of one rank that it takes; empty for any.
        relative_error: of an element of a row on its way to an expert, where rows are quantised;
            0 if rows arrive bit for bit.
        accumulation: dtype that weighted results are summed in; None for the dtype of the tokens.
        empty_batches: a rank may dispatch no tokens.
        padding: a choice of -1 selects no expert.
        repeated_experts: a token may choose an expert more than once; each choice counts.
        counts: the rows for each local expert are told.
        checked_batches: a batch that does not fit the configuration raises before any side effect.
        in_flight: dispatches that may be open, from their call to the end of their combine.
        masks: `set_active` works.
        graph_capture: dispatch and combine may be captured in a graph, and replayed.
        row_capacity: a capacity below the worst case may be asked for; what does not fit is told.
        deadline: a call whose peer does not come fails within the deadline.
        generations: `set_generation` works.
    """

    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)
    hidden_sizes: tuple[int, ...] = ()
    top_ks: tuple[int, ...] = ()
    group_sizes: tuple[int, ...] = ()
    experts_per_rank: tuple[int, ...] = ()
    relative_error: float = 0.0
    accumulation: torch.dtype | None = None
    empty_batches: bool = False
    padding: bool = False
    repeated_experts: bool = False
    counts: bool = False
    checked_batches: bool = False
    in_flight: int = 1
    masks: bool = False
    graph_capture: bool = False
    row_capacity: bool = False
    deadline: bool = False
    generations: bool = False


@dataclass(frozen=True, kw_only=True)
class ExpertParallelConfig:
    """What a group is opened for; equal on all ranks.

    Attributes:
        experts: of all ranks, a multiple of their number; expert e is expert e % k of rank e // k,
            with k experts per rank. Where experts have replicas, these are physical experts.
        top_k: choices per token.
        hidden: length of a row.
        max_tokens: most tokens that a rank dispatches at once.
        dtype: of tokens and results.
        deadline: seconds that a call waits for its peers, where `deadline` is declared.
        row_capacity: rows that one rank can send to another; None for as many as there can be.
    """

    experts: int
    top_k: int
    hidden: int
    max_tokens: int
    dtype: torch.dtype
    deadline: float
    row_capacity: int | None = None


@dataclass(frozen=True, eq=False)
class ReceivedTokens:
    """What a dispatch brought to this rank; valid until its combine was launched.

    Attributes:
        rows: [r, hidden], a row for each (token, choice) that fell on this rank, in any order.
            Contents of unused rows are undefined.
        experts: integers [r], the local expert of each row; negative for an unused row.
        counts: integers [experts of this rank], used rows by local expert; None if not declared.
        handle: for `combine`.
    """

    rows: Tensor
    experts: Tensor
    counts: Tensor | None
    handle: object


class StepStatus(Protocol):
    """Says how a step ended."""

    def ready(self) -> bool:
        """Whether `result` would return, or raise, at once; has no side effect.

        It may stay false after a failure where the device stands still: `result` tells.
        """
        ...

    def result(self, timeout: float) -> None:
        """Return when everything that was launched has run.

        Raises:
            CapacityExceeded: rows did not fit; on all ranks.
            GenerationMismatch: a rank dispatched with tables of another generation.
            StreamFailed: a call failed, for lack of a peer, say.
            StreamTimeout: not within `timeout` seconds; may be called again.
        """
        ...


POLL_INTERVAL = 0.05
"""Seconds between two looks at whether the stream has failed."""


class EventStatus:
    """The status of a step that is right if the stream comes to its end.

    Args:
        event: recorded at the end of the step.
        stream: that it was recorded on.
    """

    def __init__(self, event: Event, stream: Stream) -> None:
        self._event = event
        self._stream = stream

    def ready(self) -> bool:
        """Whether the stream has come to its end."""
        return self._event.query()

    def result(self, timeout: float) -> None:
        """Wait for it. Raises `StreamFailed` and `StreamTimeout`."""
        wait_checked(self._event.synchronize, self._stream, timeout)


def end_of_stream(accelerator: Accelerator, stream: Stream) -> EventStatus:
    """The status of a step that ends with what was launched on `stream`."""
    event = accelerator.event()
    stream.record(event)
    return EventStatus(event, stream)


def wait_checked(wait: Callable[[float], T], stream: Stream, timeout: float) -> T:
    """Return what `wait` returns, which raises `StreamTimeout` after the seconds that it is given.

    A stream that failed may stand still on the device, where nothing can end the operation that it
    waits for (clause E10): the host learns it from the stream only.

    Raises:
        StreamFailed: the stream has failed.
        StreamTimeout: not within `timeout` seconds.
    """
    expiry = time.monotonic() + timeout
    while True:
        left = expiry - time.monotonic()
        try:
            return wait(max(0.0, min(left, POLL_INTERVAL)))
        except StreamTimeout:
            stream.launch(lambda: None)  # raises if the stream has failed
            if left <= POLL_INTERVAL:
                raise


class ExpertParallelGroup(ABC):
    """One rank of a group that dispatches and combines; a base class with conservative defaults.

    It is a class and no protocol, so that an author writes three methods and inherits the others.
    All ranks make the same calls in the same order. A call launches its work on `stream`, after
    what was launched there before, or does it at once; what it returns is valid for what is
    launched on `stream` later. Later launches may overwrite what was passed.

    Args:
        accelerator: of all streams.
        deadline: seconds that the host may wait for a stream.
    """

    def __init__(self, accelerator: Accelerator, deadline: float) -> None:
        self._accelerator = accelerator
        self._deadline = deadline

    @abstractmethod
    def dispatch(
        self, tokens: Tensor, expert_ids: Tensor, weights: Tensor, stream: Stream
    ) -> ReceivedTokens:
        """Send each token to the ranks of its experts. All tensors are contiguous.

        Args:
            tokens: [n, hidden], n at most `max_tokens`.
            expert_ids: int32 [n, top_k]; -1 selects no expert, where `padding` is declared.
            weights: float32 [n, top_k], of the choices in the combined result; any real numbers.
            stream: that the work is launched on.
        """

    @abstractmethod
    def combine(self, outputs: Tensor, handle: object, stream: Stream) -> Tensor:
        """Return outputs to the ranks of their tokens, and sum them by weight.

        Args:
            outputs: [r, hidden], one for each row of the dispatch; those of unused rows are junk.
            handle: of the dispatch. One that was combined before is refused, or gives the result of
                its own dispatch.
            stream: that the work is launched on.

        Returns:
            [n, hidden], the sums; valid until the next call of `dispatch`.
        """

    @abstractmethod
    def close(self) -> None:
        """Release all resources, within a bounded time; closing again is no error."""

    @contextmanager
    def ordered(self, stream: Stream) -> Iterator[None]:
        """Run a library's calls after what was launched on `stream`, which is current meanwhile.

        On a device they launch there. On the CPU, where a library works in its call, the host
        waits for the stream first.
        """
        if self._accelerator.device.type == "cpu":
            stream.synchronize(self._deadline)
        with stream.current():
            yield

    def finish(self, stream: Stream) -> StepStatus:
        """End a step: its results may be used when the status says that it was right."""
        return end_of_stream(self._accelerator, stream)

    def set_active(self, ranks: Sequence[int]) -> None:
        """From the next dispatch on, only `ranks` take part, and call it with equal `ranks`.

        Choices on other ranks add nothing to a result. Called between two steps. Raises
        `Unsupported` where `masks` is not declared.
        """
        raise Unsupported("masks of lost ranks are not declared")

    def set_generation(self, generation: int) -> None:
        """The next dispatches route by tables of this generation.

        Raises `Unsupported` where `generations` is not declared.
        """
        raise Unsupported("generations are not declared")


@runtime_checkable
class ExpertParallelLibrary(Protocol):
    """A library: the object that an entry point of `equipoise.expert_parallel` names."""

    @property
    def name(self) -> str:
        """The name that users select it by."""
        ...

    @property
    def capabilities(self) -> ExpertParallelCapabilities:
        """What its groups can do; readable before anything is opened."""
        ...

    def probe(self) -> Probe:
        """Whether it can run on this machine."""
        ...

    def open(
        self, config: ExpertParallelConfig, accelerator: Accelerator, fabric: Fabric, purpose: str
    ) -> ExpertParallelGroup:
        """Open a group of all ranks of `fabric`; collective.

        Args:
            config: sizes, equal on all ranks.
            accelerator: this rank's device.
            fabric: this rank's connection to the others. A library with communicators of its own
                meets over `fabric.control`.
            purpose: a name that no other group has; for communicators, or keys of the control
                plane.
        """
        ...
