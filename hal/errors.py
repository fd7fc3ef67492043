"""Every exception that equipoise raises on purpose.

EquipoiseError
├── UsageError                what the user asked for cannot be done as asked
├── BackendUnavailable        the named backend is unknown, or cannot run on this machine
├── Unsupported               a capability is not declared; raised before any side effect
├── StreamError
│   ├── EventNotRecorded      waiting on an event that nothing was recorded into
│   ├── StreamFailed          a launch on the stream raised; the stream accepts no more
│   ├── StreamTimeout         the stream did not drain in time; its work continues
│   ├── LockPoisoned          a stream lock was poisoned: discard what was read under it
│   ├── LockMisuse            the writer called the lock out of order; nothing has happened
│   └── StaleEpoch            the writer used an epoch that has ended; nothing has happened
├── SlotError                 a slot, staging buffer or source does not fit its descriptor
│   ├── SlotLeased            a peer still reads the slot; nothing has happened
│   └── PoolExhausted         no page of the host pool became free in time
├── KernelError               an operand of a kernel does not fit; nothing was launched
├── CommunicatorError
│   ├── CommunicatorFailed    an operation failed, or came after one that did: rebuild first
│   │   └── OperationTimeout  an operation passed its own (hard) deadline
│   └── ResultPending         `result(timeout)` timed out; the operation continues
├── ControlError
│   ├── BallotIncomplete      not every rank cast its ballot in time
│   ├── ControlPlaneLost      the store of the control plane cannot be reached
│   ├── OrderMismatch         checked mode: ranks issued different operations; none was started
│   └── RankLost              a rank was killed, stopped or left; names rank and operation
├── Violation                 the conformance suite saw a backend break a clause
│   └── ClosingFailed         everything of a case held but the closing of a communicator
├── FormatError               a file of statistics or of a placement cannot be read or written
│   ├── FileWriteFailed       the system did not write it: a full disk, no permission
│   └── RankCountMissing      neither the file nor the caller names the number of ranks
├── ChannelError              an error of the channel between two pipeline stages
│   ├── ShapeClassError       tensors cannot be sent, or are not of the announced shape class
│   ├── MessageMismatch       what arrived is not the message that was expected: discard it
│   ├── BuffersBusy           all buffers of an edge are still being sent or read
│   ├── LeaseEnded            tensors were accessed after their lease had ended
│   ├── NotReplicated         tensors declared equal on all slices' ranks differ: nothing was sent
│   └── ChannelClosed         the edge was closed, or failed before
├── RouterError               the request router refuses a call; nothing has happened
│   ├── PolicyError           no policy can be made of these settings
│   ├── RequestError          a request is unknown, known already, or not in that state
│   └── WorkerError           a worker does not exist, or is not in that state
├── IntegrationError          a serving engine cannot be extended; nothing in it was changed
│   └── EngineUnsupported     unknown version, or a symbol is missing or differs
└── EngineError
    ├── ConfigError           an engine cannot be configured like this
    ├── PlacementError        a placement, share table or load is malformed
    ├── ExpertsLost           a loss of ranks took the last copies of some experts
    ├── RegistrationError     tensors cannot be registered as the expert weights of a layer
    │   └── ModelIncomplete   registered tensors are not those that the model's experts have
    ├── GenerationMismatch    a peer dispatched with routing tables of another generation
    ├── CapacityExceeded      rows exceeded a capacity: discard what the step computed
    ├── ExchangeError         rows do not fit their exchange; nothing has happened
    │   └── ExchangeMisuse    an exchange was called out of order or with an ended handle
    ├── RanksDiffer           ranks have different values of what must be equal; nothing was opened
    ├── VoteOutcomeUnknown    the outcome of a vote is unknown: this rank stops
    ├── HostCopyError         copy threads refuse a call; nothing was copied
    │   ├── CopyPending       a copy did not finish in time; it continues
    │   └── CopyAbandoned     the copy threads ended before the copy did: discard the destination
    └── ExpertPoolError       the host pool of expert weights cannot be created, or used like this
        ├── HostMemoryExhausted  the node has too little memory; gives required and free bytes
        ├── PoolMismatch      a peer offers another pool than it announced
        ├── PoolIncomplete    a rank of the node has not filled, or not reserved, its part
        ├── PoolCorrupted     bytes in the pool are not those that were written
        └── PoolLeased        a reader still holds parts of the pool
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class EquipoiseError(Exception):
    """Base class of every exception that Equipoise raises on purpose.

    Its message is one line: what happened, with the value, and what to do. The tree of classes is
    at the top of `hal/errors.py`.
    """


class UsageError(EquipoiseError):
    """What the user asked for cannot be done as asked."""


class BackendUnavailable(EquipoiseError):
    """The named backend is unknown, or cannot run on this machine; says why."""


class Unsupported(EquipoiseError):
    """The backend does not declare the capability; nothing has happened yet."""


class StreamError(EquipoiseError):
    """An error of a stream or an event."""


class EventNotRecorded(StreamError):
    """A wait for an event that nothing was recorded into (vendors silently ignore it)."""


class StreamFailed(StreamError):
    """A launch on the stream raised; its exception is the `__cause__`."""


class StreamTimeout(StreamError):
    """The stream did not drain in time; its work continues."""


class LockPoisoned(StreamError):
    """A stream lock was poisoned: discard what was read under it."""


class LockMisuse(StreamError):
    """The writer signalled without owning the slots, or waited while owning them."""


class StaleEpoch(StreamError):
    """The writer called the lock for an epoch that has ended."""


class SlotError(EquipoiseError):
    """A slot, staging buffer or source does not fit its descriptor."""


class SlotLeased(SlotError):
    """A peer still reads the slot, so it may not be written."""


class PoolExhausted(SlotError):
    """No page of the host pool became free in time."""


class KernelError(EquipoiseError):
    """An operand of a kernel has another dtype, size, layout or device, or no such layer."""


class CommunicatorError(EquipoiseError):
    """An error of a communicator."""


class CommunicatorFailed(CommunicatorError):
    """An operation failed, or was issued after one that did; `rebuild` comes first."""


class OperationTimeout(CommunicatorFailed):
    """An operation passed its own deadline, which fails its communicator."""


class ResultPending(CommunicatorError):
    """`result(timeout)` timed out; the operation continues and owns its buffers."""


class ControlError(EquipoiseError):
    """An error of the control plane."""


class BallotIncomplete(ControlError):
    """Not every rank cast its ballot in time.

    Attributes:
        missing: the ranks whose ballot did not arrive.
    """

    def __init__(self, question: str, missing: tuple[int, ...]) -> None:
        super().__init__(f"ballot {question!r}: no word from rank(s) {missing}")
        self.missing = missing


class ControlPlaneLost(ControlError):
    """The store of the control plane cannot be reached."""


class RankLost(ControlError):
    """A rank was killed, stopped or left.

    Attributes:
        rank: the rank that was lost.
        reason: what happened to it, as far as the control plane knows.
        operation: what the rank that raises this was doing.
    """

    def __init__(self, rank: int, reason: str, operation: str) -> None:
        super().__init__(f"rank {rank} {reason} during {operation}")
        self.rank = rank
        self.reason = reason
        self.operation = operation


class OrderMismatch(ControlError):
    """Checked mode: ranks issued different operations at the same place of the sequence."""


class Violation(EquipoiseError):
    """A backend breaks a clause of the contract.

    Attributes:
        clause: identifier in `docs/contract.md`.
        expired: whether the case ended only when a long deadline had passed.
        ends_search: whether nothing that is played on the device from now on means anything.
    """

    def __init__(self, clause: str, what: str, ends_search: bool = False) -> None:
        super().__init__(f"{clause}: {what}")
        self.clause = clause
        self.expired = False
        self.ends_search = ends_search


class ClosingFailed(Violation):
    """Everything of a case held; then a communicator failed to close (E5)."""


class FormatError(EquipoiseError):
    """A file of statistics or of a placement cannot be read or written.

    Attributes:
        path: the file or folder, as the caller named it.
        what: what is wrong with it, in one line; names layer and value where there are any.
    """

    def __init__(self, path: str, what: str) -> None:
        # Names and values come from files: they must not send control characters to a terminal.
        line = "".join(c if c.isprintable() else "?" for c in f"{path}: {what}")
        super().__init__(line)
        self.path = path
        self.what = what


class FileWriteFailed(FormatError):
    """The system did not write the file: a full disk, no permission."""


class RankCountMissing(FormatError):
    """Neither the placement file nor the caller names the number of ranks."""


class ChannelError(EquipoiseError):
    """An error of the channel between two pipeline stages."""


class ShapeClassError(ChannelError):
    """Tensors cannot be sent, or are not of the shape class that was announced."""


class MessageMismatch(ChannelError):
    """What arrived is not the message that was expected: discard its tensors."""


class BuffersBusy(ChannelError):
    """All buffers of an edge are still being sent or read; names the message that holds one."""


class LeaseEnded(ChannelError):
    """Tensors were accessed after their lease had ended: their memory may be reused."""


class NotReplicated(ChannelError):
    """Tensors that were declared equal on the ranks that send slices of them differ."""


class ChannelClosed(ChannelError):
    """The edge was closed, or an earlier message failed it."""


class RouterError(EquipoiseError):
    """The request router refuses a call; nothing has happened."""


class PolicyError(RouterError):
    """No policy can be made of these settings."""


class RequestError(RouterError):
    """A request is unknown, known already, or in a state in which that cannot happen."""


class WorkerError(RouterError):
    """A worker does not exist, or is in a state in which that cannot happen."""


class IntegrationError(EquipoiseError):
    """A serving engine cannot be extended; nothing in it was changed."""


class EngineUnsupported(IntegrationError):
    """The engine has an unknown version, lacks a symbol, or has one of another signature."""


class EngineError(EquipoiseError):
    """An error of the balancer's engine."""


class ConfigError(EngineError):
    """An engine cannot be configured like this."""


class PlacementError(EngineError):
    """A placement, a share table or a load is malformed."""


class ExpertsLost(EngineError):
    """The last copies of some experts were on ranks that are lost.

    Attributes:
        lost_experts: the experts, by layer.
    """

    def __init__(self, lost_experts: "Mapping[int, Sequence[int]]", prefix: str = "") -> None:
        layers = "; ".join(
            f"layer {layer}: {list(lost_experts[layer])}" for layer in sorted(lost_experts)
        )
        super().__init__(f"{prefix}no copy is left of expert(s) in {layers}")
        self.lost_experts = {layer: tuple(experts) for layer, experts in lost_experts.items()}


class RegistrationError(EngineError):
    """Tensors cannot be registered as the expert weights of a layer; names all three."""


class ModelIncomplete(RegistrationError):
    """The registered tensors are not those that the model's experts have.

    Attributes:
        missing: names of tensors that look like experts' and would not move with them.
        unexpected: registered tensors, as "layer 3, tensor 'w'", that the model does not hold.
    """

    def __init__(self, what: str, missing: tuple[str, ...], unexpected: tuple[str, ...]) -> None:
        super().__init__(what)
        self.missing = missing
        self.unexpected = unexpected


class GenerationMismatch(EngineError):
    """A peer dispatched with routing tables of another generation; raised before compute."""


class CapacityExceeded(EngineError):
    """More rows than a capacity in a step, on some rank: discard what the step computed."""


class ExchangeError(EngineError):
    """Rows do not fit their exchange; nothing has happened."""


class ExchangeMisuse(ExchangeError):
    """An exchange was called out of order or with an ended handle; nothing has happened."""


class RanksDiffer(EngineError):
    """Ranks were given different values of something that has to be equal on all of them.

    Raised on every rank with the same text, before anything is opened.
    """


class VoteOutcomeUnknown(EngineError):
    """This rank did not learn the outcome of a vote by its deadline: it stops."""


class HostCopyError(EngineError):
    """Copy threads refuse a call; nothing was copied."""


class CopyPending(HostCopyError):
    """A copy did not finish in time; it continues, and its handle owns the memory."""


class CopyAbandoned(HostCopyError):
    """The copy threads ended before the copy did: the destination may hold a part of it."""


class ExpertPoolError(EngineError):
    """The host pool of expert weights cannot be created, or used like this."""


class HostMemoryExhausted(ExpertPoolError):
    """The node has too little memory for the expert pool.

    Attributes:
        required: bytes that the pool needs.
        free: bytes that are free.
        limit: what limits them, in words.
    """

    def __init__(self, required: int, free: int, limit: str) -> None:
        super().__init__(f"the expert pool wants {required} bytes, and {limit} leaves {free}")
        self.required = required
        self.free = free
        self.limit = limit


class PoolMismatch(ExpertPoolError):
    """A peer offers another pool than it announced, or one that cannot be opened here."""


class PoolIncomplete(ExpertPoolError):
    """A rank of the node has not filled, or could not reserve, its part of the pool."""


class PoolCorrupted(ExpertPoolError):
    """Bytes in the pool are not those that were written."""


class PoolLeased(ExpertPoolError):
    """A reader still holds parts of the pool, so it cannot be closed."""
