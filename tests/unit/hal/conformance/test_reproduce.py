"""Programs as Python: what is written is the case that was found."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from equipoise.hal.conformance.program import Case, Step, make_program
from equipoise.hal.conformance.reproduce import Reproduction, python_source

TEXTS = st.text(max_size=8)
ARGUMENTS = st.integers() | TEXTS
STEPS = st.builds(
    Step,
    TEXTS,
    st.lists(ARGUMENTS, max_size=3).map(tuple),
    st.integers(-1, 3),
    st.integers(0, 1),
)
CASES = st.builds(
    Case,
    st.builds(
        make_program, st.lists(STEPS, max_size=4), st.integers(1, 8),
        st.dictionaries(TEXTS, ARGUMENTS, max_size=3),
    ),
    st.binary(max_size=8),
)  # fmt: skip


@given(CASES, TEXTS, st.none() | TEXTS)
def test_written_program_is_that_of_the_case(case: Case, what: str, steer: str | None) -> None:
    written = Reproduction(
        property="p", executor="virtual", backend="b", communicator="c", case=case, steer=steer
    )
    names: dict[str, Any] = {"__name__": "read"}
    exec(compile(python_source(written, "about", what), "program.py", "exec"), names)
    assert names["REPRODUCTION"] == written


def test_long_stacks_are_cut_in_file() -> None:
    case = Case(make_program([Step("isend", (1,))]))
    written = Reproduction(property="p", executor="ranks", backend="b", communicator="c", case=case)
    source = python_source(written, "about", "\n".join(f"frame {n}" for n in range(500)))
    assert "# frame 19\n" in source
    assert "frame 20" not in source
