"""The clauses of the contract in a few words each; `docs/contract.md` has the whole text."""

from collections.abc import Mapping
from enum import StrEnum

FAMILIES = (
    "ordering",
    "locks",
    "visibility",
    "addresses",
    "keepalive",
    "progress",
    "failures",
    "faults",
    "shapes",
    "determinism",
    "kernels",
    "timeouts",
    "control",
    "resources",
    "overlap",
)
"""What properties of a backend are grouped by."""
COMMUNICATOR_FAMILIES = (
    "keepalive",
    "progress",
    "failures",
    "faults",
    "shapes",
    "determinism",
    "timeouts",
)
"""What concerns a communicator by itself, without the control plane that goes with it."""
EXPERT_PARALLEL = "expert_parallel"
"""The family that judges an expert-parallel library, where one is named; never part of another."""
CLAUSE_LETTERS = "OVAKPESDGXLCBRTM"
"""The letters of the contract, in its order."""
SIGNATURES = "R3"
"""The clause of signatures. Any property may find it broken: by a method that is not there."""
HANG = "C8"
"""The clause of a rank that does not answer. Any property may find it broken."""
CLOSING = "E5"
"""The clause of closing. Any case on ranks may find it broken: its communicators are closed."""
METHODS = "M17"
"""The clause of the methods of an expert-parallel library."""

TITLES: Mapping[str, str] = {
    "O1": "a stream runs in the order of issue",
    "O2": "a wait orders what was recorded before it, and nothing else",
    "O3": "waiting on a never-recorded event raises",
    "O4": "recording again neither releases nor strands earlier waiters",
    "O5": "stream lock: no writer beside a reader, no lost wake-up",
    "O6": "the stream lock works inside a captured graph",
    "O7": "an event says when its point is reached",
    "V1": "after the event, every byte of the new version is seen",
    "V2": "a reader sees one version of a slot, whole",
    "V3": "tables and weights of a layer change together",
    "V4": "a commit of many slots is one step for every reader",
    "V5": "operations of a store take effect in the order of issue",
    "A1": "address, shape, stride, dtype and format never change",
    "A2": "staging is not rewritten under a commit that reads it",
    "A3": "in-place collectives equal out-of-place ones",
    "A4": "neighbours stay untouched: guard bands survive",
    "A5": "duplicates, self-moves, cycles and fan-out end as proposed",
    "A6": "a segment may lie at any byte offset",
    "A7": "equal descriptors are copied as bytes; anything else is counted",
    "A8": "a bad argument raises before any side effect",
    "A9": "new weights reach a slot in service only by commit",
    "A10": "private formats travel whole",
    "A11": "a leased slot is written by nobody",
    "A12": "commit and write wait for every registered reader",
    "A13": "a pool page is not handed out under a copy",
    "K1": "an operation owns its buffers until it really ended",
    "K2": "dropping a Work neither cancels nor leaks",
    "K3": "done, wait and result: any number of times, order, thread",
    "K4": "works may be waited for out of order",
    "K5": "done means that result returns, or raises",
    "K6": "dropping a Work waits for no peer",
    "P1": "isend and irecv never block the host",
    "P2": "matching is first in, first out per pair",
    "P3": "an unmatched operation fails its communicator, no other",
    "P4": "two communicators progress independently",
    "P5": "a mapping of tensors in flight waits once",
    "P6": "threads of a rank may share a communicator",
    "E1": "a fault anywhere ends every wait, naming the operation",
    "E2": "after a failure every call says so until rebuild",
    "E3": "result's time-out is soft, the deadline is hard",
    "E4": "cancel ends the operation, and keeps its buffers",
    "E5": "closing is bounded, and what is closed takes nothing",
    "E6": "all errors stand in one tree",
    "E7": "a program that raises fails its stream",
    "E8": "abort ends what is in flight",
    "E9": "rebuild makes the communicator usable again",
    "E10": "a stream that waits for what fails has failed",
    "E11": "a wait lasts to its time-out, and no longer",
    "S1": "every dtype, any dimensions, size zero, one byte",
    "S2": "a layout is copied right or rejected",
    "S3": "uneven all-to-all with rows and columns of zeros",
    "S4": "misaligned addresses work",
    "S5": "groups of any size, and overlapping ones",
    "D1": "same inputs, same bits; integer sums exact",
    "D2": "every rank computes the same plan",
    "D3": "weights travel as bytes, counters as integers",
    "D4": "the checksum is one function of the bytes",
    "G1": "routing reads the tables of one generation",
    "G2": "commit_tables writes the generation word last",
    "G3": "kernels may be captured and never block the host",
    "G4": "kernels equal the reference bit for bit",
    "G5": "rank and layer enter the routing hash",
    "G6": "an id outside the experts is padding",
    "G7": "every dispatch carries the installed generation",
    "G8": "another engine's routing rule is kept bit for bit",
    "G9": "an exchange that reads no count says what did not fit",
    "G10": "a commit of tables installs every layer that it names",
    "G11": "an operand of a kernel fits, or nothing happens",
    "G12": "shares of a layer without tables are left alone",
    "G13": "a levelled batch is divided as the reference divides it",
    "X1": "a round carries at most one blob a pair",
    "X2": "warm builds links in one order on every rank",
    "X3": "what fails on one communicator fails no other",
    "X4": "every collective equals its definition",
    "X5": "what is unsupported raises before any side effect",
    "X6": "operations come after the current stream's launches",
    "X7": "a stream can wait for a Work",
    "X8": "a rank that leaves after opening strands no rank that opens",
    "L1": "one signal releases exactly one waiter, early or late",
    "L2": "the lock's words reset themselves",
    "L3": "a late signal of an older epoch releases nobody",
    "L4": "a waiting stream leaves the device free",
    "L5": "a copy from the host completes while a stream waits",
    "L6": "a poison releases waiters and is reported",
    "L7": "a released waiter sees what was written before",
    "C1": "a ballot never changes",
    "C2": "a decision never changes and is one for all",
    "C3": "the store outlives any rank",
    "C4": "collect names who is missing",
    "C5": "a lost rank is named, a beating one is not",
    "C6": "a store that is gone or silent is said to be",
    "C7": "checked mode: a mismatch raises on every rank",
    "C8": "every host wait is bounded",
    "C9": "what was forgotten is as if it had never been asked",
    "B1": "probe says available or why not",
    "B2": "capabilities are frozen and readable beforehand",
    "B3": "backends are found by name",
    "B4": "a role's stream is always the same",
    "B5": "adopt wraps a foreign stream or raises",
    "B6": "pinned gives host memory, page-locked where declared",
    "B7": "a graph captures without running, and replays",
    "B8": "streams run side by side",
    "B9": "ranks share a device only where that is declared",
    "B10": "memory and topology make sense",
    "R1": "resources return to the baseline",
    "R2": "a capability holds, or raises before any side effect",
    "R3": "signatures equal the protocol's",
    "R4": "importing initialises nothing",
    "T1": "copy, communication and compute overlap",
    "M1": "combine is the dense sum over a token's choices",
    "M2": "each row arrives once, whole, at the expert that it names",
    "M3": "no tokens, and all of them for one expert, are right too",
    "M4": "padding counts for nothing, a repeated expert each time",
    "M5": "the counts told are those of the rows received",
    "M6": "what is passed is only read, its neighbours untouched",
    "M7": "later launches may overwrite what was passed",
    "M8": "an ended handle is refused, or gives its own result",
    "M9": "dispatches in flight do not mix",
    "M10": "lost ranks are left out, and all else stays right",
    "M11": "a captured step is replayed with new contents",
    "M12": "a batch that does not fit is refused before it is sent",
    "M13": "what exceeds a capacity is told on every rank",
    "M14": "a peer that does not come is told by the deadline",
    "M15": "ranks of different generations are told, all of them",
    "M16": "steps leak nothing, closing is bounded, and again no error",
    "M17": "a group has the methods of its protocol",
}
"""Identifier by identifier, in the order of the contract."""


class Level(StrEnum):
    """A group of clauses that a backend keeps or does not keep: what a vendor can publish."""

    CORE = "core"
    """What every program relies on while nothing fails: values, buffers, matching, honesty."""
    FAULT = "fault"
    """What happens when an operation, a rank or a deadline fails."""
    STREAM = "stream"
    """What is ordered on a device without the host: streams, events, locks, graphs, commits."""
    ELASTIC = "elastic"
    """A communicator that ends its operations, and continues among the survivors."""


_CORE = """
    A1 A3 A4 A5 A6 A7 A8 A10 A11 A13 K1 K2 K3 K4 K5 K6 P1 P2 P4 P6 S1 S2 S3 S4 S5 D1 D3 D4
    G4 G5 G6 G8 G10 G11 G12 G13 X1 X2 X4 X5 C1 C2 C4 C9 B1 B2 B4 B5 B6 B10 R1 R2 R3 R4
    M1 M2 M3 M4 M5 M6 M7 M8 M9 M12 M16 M17
"""
_FAULT = "P3 E1 E2 E3 E4 E5 E7 E10 E11 X3 X8 L6 C3 C5 C6 C7 C8 M13 M14 M15"
_STREAM = "O1 O2 O3 O4 O5 O6 O7 V1 V2 V3 V4 V5 A2 A12 G1 G2 G3 X6 X7 L1 L2 L3 L4 L5 L7 B7 B8 M11"
_ELASTIC = "E8 E9 M10"
LEVELS: Mapping[str, Level] = {
    clause: level
    for level, clauses in zip(Level, (_CORE, _FAULT, _STREAM, _ELASTIC), strict=True)
    for clause in clauses.split()
}
"""The level of each clause that a backend is judged by. Those that are reported, or bind another
part of the package, have none. A property has the level of the first clause that it judges."""


def clause_sort_key(clause: str) -> tuple[int, int]:
    """Sort key for the order of the contract."""
    return CLAUSE_LETTERS.index(clause[0]), int(clause[1:])
