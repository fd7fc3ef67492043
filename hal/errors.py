"""Every exception that equipoise raises on purpose.

EquipoiseError
├── UsageError                what was asked for cannot be done as asked
├── BackendUnavailable        the named backend is unknown, or cannot run on this machine
├── Unsupported               a capability is not declared; raised before any side effect
├── StreamError
│   ├── EventNotRecorded      waiting on an event that nothing was recorded into
│   ├── StreamFailed          a program on the stream raised; the stream takes no more
│   ├── StreamTimeout         the stream did not drain in time (it goes on)
│   ├── LockPoisoned          a stream lock was poisoned: discard what was read under it
│   ├── LockMisuse            a mover's verb out of turn; nothing has happened
│   └── StaleEpoch            a mover's verb for an epoch that is over; nothing has happened
├── SlotError                 a slot, staging buffer or source does not fit its descriptor
│   ├── SlotLeased            a peer still reads the slot; nothing has happened
│   └── PoolExhausted         no page of the host pool became free in time
├── KernelError               an operand of a kernel does not fit; nothing was launched
├── CommunicatorError
│   ├── CommunicatorFailed    an operation failed, or came after one that did: rebuild first
│   │   └── OperationTimeout  an operation passed its own (hard) deadline
│   └── ResultPending         `result(timeout)` gave up waiting; the operation lives on
├── ControlError
│   ├── BallotIncomplete      not every rank cast its ballot in time
│   ├── ControlLost           the store of the control plane cannot be reached
│   ├── OrderMismatch         checked mode: ranks issued different operations; none was started
│   └── RankLost              a rank was killed, stopped or left; names rank and operation
├── Violation                 the conformance suite saw a backend break a clause
├── FormatError               a file of statistics or of a placement cannot be read, or written
│   ├── FileUnwritten         the system did not take it: a full disk, no permission
│   └── RanksUnsaid           it does not say for how many ranks it is, and nobody else did
├── ChannelError              something about what one stage hands to another
│   ├── ShapeClassError       tensors cannot travel so, or are not the class that was announced
│   ├── MessageMismatch       what arrived is not the message that was expected: discard it
│   ├── BuffersHeld           all buffers of an edge are still sent from, or read
│   ├── LeaseEnded            tensors were asked for behind the end of their lease
│   ├── NotReplicated         tensors declared alike on all slices' ranks differ: nothing was sent
│   └── ChannelClosed         the edge was closed, or failed before
├── RouterError               a router of requests cannot do that; nothing has happened
│   ├── PolicyError           no policy can be made of these settings
│   ├── RequestError          a request is unknown, known already, or not in that state
│   └── WorkerError           a worker does not exist, or is not in that state
├── IntegrationError          a serving engine cannot be extended so; nothing of it was changed
│   └── EngineUnsupported     it is another version, or lacks a symbol, or has one otherwise
└── EngineError
    ├── ConfigError           an engine cannot be configured so
    ├── PlacementError        a placement, share table or load is malformed
    ├── ExpertsLost           a loss of ranks took the last copies of some experts
    ├── RegistrationError     tensors cannot be taken for the expert weights of a layer
    │   └── ModelIncomplete   the model holds tensors of experts that nobody registered
    ├── GenerationMismatch    a peer dispatched with routing tables of another generation
    ├── ExchangeError         rows do not fit the exchange that is given them; nothing has happened
    │   └── ExchangeMisuse    a verb of an exchange out of turn, or with a handle that is over
    ├── AgreementLost         the outcome of a vote could not be learnt: this rank fail-stops
    ├── CopierError           the host copier cannot do that; nothing was copied
    │   ├── CopyPending       a copy was not done in time; it goes on
    │   └── CopyAbandoned     the copier ended before the copy did: discard the destination
    └── ExpertPoolError       the host pool of expert weights cannot be made, or used so
        ├── NoRoom            the node's memory does not suffice; says wanted and free
        ├── ForeignMemory     what a peer offered is not the pool that it promised
        ├── PoolIncomplete    a rank of the node has not filled, or not reserved, its part
        ├── PoolDamaged       bytes in the pool are not those that were written
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
    """Something about a stream or an event."""


class EventNotRecorded(StreamError):
    """Waiting on an event that nothing was recorded into (vendors silently ignore it)."""


class StreamFailed(StreamError):
    """A program on the stream raised; its exception is the `__cause__`."""


class StreamTimeout(StreamError):
    """The stream did not drain in time; what it runs goes on."""


class LockPoisoned(StreamError):
    """A stream lock was poisoned: what was read under it is to be discarded."""


class LockMisuse(StreamError):
    """A mover signalled without owning the slots, or waited while owning them."""


class StaleEpoch(StreamError):
    """A mover came late, from an epoch of the stream lock that is over."""


class SlotError(EquipoiseError):
    """A slot, staging buffer or source does not fit its descriptor."""


class SlotLeased(SlotError):
    """A peer still reads the slot, so nobody may write it."""


class PoolExhausted(SlotError):
    """No page of the host pool became free in time."""


class KernelError(EquipoiseError):
    """An operand of a kernel has another dtype, size, layout or device, or no such layer."""


class CommunicatorError(EquipoiseError):
    """Something about a communicator."""


class CommunicatorFailed(CommunicatorError):
    """An operation failed, or was issued after one that did; `rebuild` comes first."""


class OperationTimeout(CommunicatorFailed):
    """An operation passed its own deadline, which fails its communicator."""


class ResultPending(CommunicatorError):
    """`result(timeout)` gave up waiting; the operation lives on and owns its buffers."""


class ControlError(EquipoiseError):
    """Something about the control plane."""


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

    def __init__(self, rank: int, how: str, operation: str) -> None:
        super().__init__(f"rank {rank} {how} during {operation}")
        self.rank = rank
        self.reason = how
        self.operation = operation


class OrderMismatch(ControlError):
    """Checked mode: ranks issued different operations at the same place of the sequence."""


class Violation(EquipoiseError):
    """A backend breaks a clause of the contract.

    Attributes:
        clause: identifier in `docs/contract.md`.
    """

    def __init__(self, clause: str, what: str) -> None:
        super().__init__(f"{clause}: {what}")
        self.clause = clause


class FormatError(EquipoiseError):
    """A file of statistics or of a placement cannot be read, or written.

    Attributes:
        path: the file, or the folder, as it was named.
        what: what is wrong with it, in one line; names layer and value where there are any.
    """

    def __init__(self, path: str, what: str) -> None:
        # Names and values are from outside: a terminal gets no line breaks and no controls of them.
        line = "".join(c if c.isprintable() else "?" for c in f"{path}: {what}")
        super().__init__(line)
        self.path = path
        self.what = what


class FileWriteFailed(FormatError):
    """The system did not take it: a full disk, no permission."""


class RankCountMissing(FormatError):
    """A placement does not say for how many ranks it is, and nobody else did."""


class ChannelError(EquipoiseError):
    """Something about what one stage hands to another."""


class ShapeClassError(ChannelError):
    """Tensors cannot travel so, or are not of the shape class that was announced."""


class MessageMismatch(ChannelError):
    """What arrived is not the message that was expected: its tensors are to be discarded."""


class BuffersBusy(ChannelError):
    """All buffers of an edge are still sent from, or read; names the message that holds one."""


class LeaseEnded(ChannelError):
    """Tensors were asked for behind the end of their lease: others may be in their memory."""


class NotReplicated(ChannelError):
    """Tensors that were declared alike on the ranks that send slices of them are not."""


class ChannelClosed(ChannelError):
    """The edge was closed, or an earlier message failed it."""


class RouterError(EquipoiseError):
    """A router of requests cannot do that; nothing has happened."""


class PolicyError(RouterError):
    """No policy can be made of these settings."""


class RequestError(RouterError):
    """A request is unknown, known already, or in a state in which that cannot happen."""


class WorkerError(RouterError):
    """A worker does not exist, or is in a state in which that cannot happen."""


class IntegrationError(EquipoiseError):
    """A serving engine cannot be extended so; nothing of it was changed."""


class EngineUnsupported(IntegrationError):
    """The engine is another version, or lacks a symbol, or has one of another signature."""


class EngineError(EquipoiseError):
    """Something about the balancer's engine."""


class ConfigError(EngineError):
    """An engine cannot be configured so."""


class PlacementError(EngineError):
    """A placement, a share table or a load is malformed."""


class ExpertsLost(EngineError):
    """The last copies of some experts were on ranks that are gone, and nothing else has them.

    Attributes:
        lost_experts: the experts, by layer.
    """

    def __init__(self, gone: "Mapping[int, Sequence[int]]", whose: str = "") -> None:
        layers = "; ".join(f"layer {layer}: {list(gone[layer])}" for layer in sorted(gone))
        super().__init__(f"{whose}no copy is left of expert(s) in {layers}")
        self.lost_experts = {layer: tuple(experts) for layer, experts in gone.items()}


class RegistrationError(EngineError):
    """Tensors cannot be taken for the expert weights of a layer; names model, layer and tensor."""


class ModelIncomplete(RegistrationError):
    """What is registered, and what the model holds for its experts, are not the same.

    Attributes:
        missing: names of tensors that look like experts' and would stay behind when experts move.
        unexpected: registered tensors, as "layer 3, tensor 'w'", that the model does not hold.
    """

    def __init__(self, what: str, missing: tuple[str, ...], strangers: tuple[str, ...]) -> None:
        super().__init__(what)
        self.missing = missing
        self.unexpected = strangers


class GenerationMismatch(EngineError):
    """A peer dispatched with routing tables of another generation; raised before compute."""


class ExchangeError(EngineError):
    """Rows do not fit the exchange that is given them; nothing has happened."""


class ExchangeMisuse(ExchangeError):
    """A verb of an exchange out of turn, or with a handle that is over; nothing has happened."""


class VoteOutcomeUnknown(EngineError):
    """The outcome of a vote could not be learnt by its deadline: this rank fail-stops."""


class CopierError(EngineError):
    """The host copier cannot do what was asked; nothing was copied."""


class CopyPending(CopierError):
    """A copy was not done in time; it goes on, and its ticket owns the memory."""


class CopyAbandoned(CopierError):
    """The copier ended before the copy did: the destination holds parts of it at most."""


class ExpertPoolError(EngineError):
    """The host pool of expert weights cannot be made, or not be used so."""


class HostMemoryExhausted(ExpertPoolError):
    """The node's memory does not suffice.

    Attributes:
        required: bytes that the pool takes.
        free: bytes that could be had.
        limit: limit that is, in words.
    """

    def __init__(self, wanted: int, free: int, whose: str) -> None:
        super().__init__(f"the expert pool wants {wanted} bytes, and {whose} leaves {free}")
        self.required = wanted
        self.free = free
        self.limit = whose


class PoolMismatch(ExpertPoolError):
    """What a peer offered is not the pool that it promised, or cannot be opened from here."""


class PoolIncomplete(ExpertPoolError):
    """A rank of the node has not filled, or could not reserve, its part."""


class PoolCorrupted(ExpertPoolError):
    """Bytes in the pool are not those that were written."""


class PoolLeased(ExpertPoolError):
    """A reader still holds parts of the pool, so it cannot be closed."""
