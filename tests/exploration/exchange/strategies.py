"""Cases that hypothesis draws."""

from exploration.exchange.case import Case, Grid, Rows
from hypothesis import strategies as st

from equipoise.backends.virtual.profiles import PROFILES

DTYPES = ["float32", "bfloat16", "uint8", "int64", "bool", "float16", "float8_e4m3fn"]
ROLES = ["compute", "aux"]
STRANGE = [-1, 2**31 - 1]
"""Ids of padding beside the invalid slot itself."""


@st.composite
def rows(draw: st.DrawFn) -> Rows:
    return draw(st.lists(st.integers(0, 3), max_size=2)), draw(st.sampled_from(DTYPES))


@st.composite
def grids(draw: st.DrawFn, slots: int, top_k: int) -> Grid:
    """The batch of a rank: anything, nothing, or all to one slot."""
    ids = st.sampled_from([*range(slots + 1), *STRANGE])
    one = draw(ids)
    choice = draw(st.sampled_from([ids, ids, st.just(one), st.integers(0, min(slots - 1, 1))]))
    token = st.lists(choice, min_size=top_k, max_size=top_k)
    return draw(st.lists(token, max_size=5))


def replicas(slots: int) -> st.SearchStrategy[list[int]]:
    """A placement of few experts, some of them in several slots, also of one rank."""
    return st.lists(st.integers(0, 2), min_size=slots, max_size=slots)


@st.composite
def steps(draw: st.DrawFn, size: int, slots: int, top_k: int) -> list[list[list[Grid]]]:
    """One to three steps of one to three batches each."""
    batch = st.tuples(*(grids(slots, top_k) for _ in range(size))).map(list)
    return draw(st.lists(st.lists(batch, min_size=1, max_size=3), min_size=1, max_size=3))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Anything; now and then with a capacity, with ranks that take no part, with other generations.

    Schedules are long beside what hypothesis shrinks, so they repeat.
    """
    size, per_rank, top_k = (draw(st.integers(1, most)) for most in (4, 3, 3))
    grids_by_step = draw(steps(size, size * per_rank, top_k))
    some = st.lists(st.integers(0, size - 1), min_size=1, unique=True)
    stranger = st.tuples(
        st.integers(0, len(grids_by_step) - 1), st.just(0), st.integers(0, size - 1)
    )
    return Case(
        size=size,
        per_rank=per_rank,
        top_k=top_k,
        experts=draw(st.integers(0, 3)),
        payloads=draw(st.lists(rows(), min_size=1, max_size=3)),
        result=draw(rows()),
        capacity=draw(st.sampled_from([0, 0, 1, 2, 4])),
        result_capacity=draw(st.sampled_from([0, 0, 1, 3, 6])),
        active=draw(st.one_of(st.just([]), some)),
        placement=draw(st.one_of(st.just([]), replicas(size * per_rank))),
        steps=grids_by_step,
        odd=draw(st.lists(stranger.map(list), max_size=1)),
        streams=draw(st.sampled_from([ROLES[:1], ROLES, ROLES[::-1]])),
        reader=draw(st.sampled_from(ROLES)),
        split=draw(st.booleans()),
        judge=draw(st.sampled_from(ROLES)),
        ahead=draw(st.booleans()),
        late=draw(st.sampled_from(["", *ROLES])),
        world=draw(st.sampled_from(["", "", *PROFILES])),
        schedule=list(draw(st.binary(max_size=60))),
    )
