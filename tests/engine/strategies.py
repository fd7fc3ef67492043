"""Cases to explore."""

from engine.case import Cadence, Case, Fault, FaultKind, Lag, Path
from engine.worlds import WORLDS
from hypothesis import strategies as st

from equipoise.balancer.experts.config import ShareMode
from equipoise.balancer.experts.placement import Shape

LANES = ("mover", "mover", "host", "clerk", "aux", "copy", "compute", "planner", "solver", "outbox")
"""The lane on which most depends is there twice."""
OFTEN = (FaultKind.HASTY_CLERK, FaultKind.HASTY_CLERK, FaultKind.STORE_CUT, FaultKind.OTHER_PLAN)
"""Faults that matter at few moments only are tried at more."""
ON_THE_WAY = frozenset(
    {
        FaultKind.OTHER_TABLES,
        FaultKind.BLOB_FLIPPED,
        FaultKind.STAGING_FLIPPED,
        FaultKind.MESSAGE_LOST,
        FaultKind.EXCHANGE_EXPIRES,
    }
)
"""Faults of weights that come from peers."""
LONGEST = 96
"""Bytes of a schedule, which is played over and over."""
STEPS = (4, 8)
SHAPES = [
    Shape(layers, experts, ranks * size, ranks)
    for ranks in (2, 3)
    for layers in (2, 3)
    for experts in (4, 5, 6)
    for size in (2, 3)
    if ranks * size >= experts
]


def _lags(ranks: int) -> st.SearchStrategy[tuple[Lag, ...]]:
    lag = st.builds(
        lambda kind, rank, first, length: Lag(kind, rank, first, first + length),
        st.sampled_from(LANES),
        st.integers(0, ranks - 1),
        st.integers(0, STEPS[1]),
        st.integers(0, 6),
    )
    return st.lists(lag, max_size=4).map(tuple)


def _faults(ranks: int, kinds: list[FaultKind]) -> st.SearchStrategy[tuple[Fault, ...]]:
    fault = st.builds(
        Fault,
        st.sampled_from(kinds),
        st.integers(0, ranks - 1),
        st.integers(0, STEPS[1]),
        st.integers(0, 40),
    )
    return st.lists(fault, min_size=1, max_size=2).map(tuple)


def _of(
    shape: Shape,
    paths: tuple[Path, ...],
    worlds: list[str],
    faults: st.SearchStrategy[tuple[Fault, ...]],
) -> st.SearchStrategy[Case]:
    size = shape.slots_per_rank
    choices = st.binary(max_size=LONGEST) | st.binary(min_size=16, max_size=LONGEST)
    return st.builds(
        Case,
        shape=st.just(shape),
        staging=st.sampled_from((size, size + 1, shape.layers * size)),
        parcel=st.integers(1, 4),
        path=st.sampled_from(paths),
        world=st.sampled_from(worlds),
        shares=st.sampled_from((ShareMode.STATIC, ShareMode.LAGGED)),
        cadence=st.sampled_from((Cadence(1, 1, 2), Cadence(1, 1, 1), Cadence(2, 2, 2))),
        patience=st.sampled_from((64, 2, 4)),
        readers=st.sampled_from(((), (0,), tuple(range(shape.ranks)))),
        ahead=st.integers(0, 2),
        steps=st.integers(*STEPS),
        script=st.integers(0, 1 << 16),
        hot=st.lists(st.integers(0, shape.experts - 1), min_size=1, max_size=4).map(tuple),
        schedule=choices,
        lags=_lags(shape.ranks),
        faults=faults,
    )


def _travelling(kinds: list[FaultKind]) -> list[st.SearchStrategy[Case]]:
    """Weights come from peers."""
    return [
        _of(shape, (Path.BOUNDARY,), list(WORLDS), _some(shape.ranks, kinds)) for shape in SHAPES
    ]


def _rewriting(kinds: list[FaultKind]) -> list[st.SearchStrategy[Case]]:
    """Slots are rewritten in place: on every other shape, since there is less to go wrong."""
    paths, kinds = (Path.BY_STREAM, Path.BY_HOST), [k for k in kinds if k not in ON_THE_WAY]
    worlds = [name for name, world in WORLDS.items() if world.capabilities.stream_lock]
    return [_of(shape, paths, worlds, _some(shape.ranks, kinds)) for shape in SHAPES[::2]]


def _some(ranks: int, kinds: list[FaultKind]) -> st.SearchStrategy[tuple[Fault, ...]]:
    return _faults(ranks, kinds) if kinds else st.just(())


KINDS = [*FaultKind, *OFTEN]
HEALTHY = st.one_of([*_travelling([]), *_rewriting([])])
"""Nothing goes wrong, but anything may be late."""
FAULTY = st.one_of([*_travelling(KINDS), *_rewriting(KINDS)])
"""One or two faults at any point."""
