"""Entries of a layer in the two steps in which it has a lock, whatever order threads take."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balancer.experts.transfer.layer_locks import EntryCounter
from equipoise.hal.errors import EngineError, LockPoisoned


@given(st.data(), st.integers(1, 4), st.integers(0, 9))
def test_visits_hold_lock_from_first_entry_to_last_exit(
    data: st.DataObject, entries: int, first: int
) -> None:
    visits, told = EntryCounter(5, first, entries), list[str]()
    for step in (first, first + 1):
        told.clear()
        waiting, inside = entries, 0
        while waiting or inside:
            enters = not inside or (waiting and data.draw(st.booleans()))
            if enters:
                visits.enter(step, lambda: told.append("take"))
                waiting, inside = waiting - 1, inside + 1
            else:
                visits.exit(lambda: told.append("give back"))
                inside -= 1
            over = not waiting and not inside
            assert told == ["take", "give back"][: 1 + over]
    visits.check_finished()


@given(st.integers(1, 4), st.integers(0, 9), st.data())
def test_layer_visits_must_equal_declared_entries(
    entries: int, made: int, data: st.DataObject
) -> None:
    visits = EntryCounter(5, 7, entries)
    here = min(made, entries)
    for _ in range(here):
        visits.enter(7, lambda: None)
    left = data.draw(st.integers(0, here))
    for _ in range(left):
        visits.exit(lambda: None)
    if here == entries:
        with pytest.raises(EngineError, match=f"layer 5 is entered more than {entries} times in s"):
            visits.enter(7, lambda: None)
    if left < entries:
        says = f"layer 5 was entered {here} times and left {left} times in step 7, not {entries}"
        with pytest.raises(EngineError, match=says):
            visits.enter(8, lambda: None)
    with pytest.raises(EngineError, match=f"in step {7 + (left == entries)}, not {entries}"):
        visits.check_finished()


def test_visits_do_not_count_entry_whose_lock_failed() -> None:
    visits = EntryCounter(5, 7, 1)

    def poisoned() -> None:
        raise LockPoisoned("late")

    with pytest.raises(LockPoisoned):
        visits.enter(7, poisoned)
    visits.enter(7, lambda: None)
