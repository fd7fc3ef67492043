"""How hypothesis draws, where the defaults do not fit."""

from collections.abc import Callable
from typing import TypeVar, cast

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

SEED = 1
Case = TypeVar("Case")


def few(examples: int, *, shrink: bool = True) -> settings:
    """For cases that processes play: so many of them, each as long as it takes.

    `shrink` says whether the smallest case that fails is looked for.
    """
    shrinking = [Phase.shrink] if shrink else []
    return settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
        phases=[Phase.explicit, Phase.generate, *shrinking],
    )


def each_of(cases: st.SearchStrategy[Case], count: int, tell: Callable[[Case], object]) -> None:
    """Tell of `count` cases, always the same."""

    @seed(SEED)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases={Phase.generate},
        suppress_health_check=cast(list[HealthCheck], list(HealthCheck)),
        report_multiple_bugs=False,
        print_blob=False,
    )
    @given(cases)
    def test(case: Case) -> None:
        tell(case)

    test()
