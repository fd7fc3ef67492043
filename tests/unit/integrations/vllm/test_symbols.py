"""What is looked at before anything of an engine is touched."""

import functools
import re
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.fakes.fake_vllm import engine

from equipoise.integrations.vllm.compatibility import Symbol, signature_of, symbol_problems


def all_parameter_kinds(a: int, /, b: int = 1, *rest: int, c: int, d: int = 2, **more: int) -> None:
    """Every kind of parameter."""


def by_name_only(a: int, *, c: int = 1) -> None:
    """By name only."""


def test_signature_of_renders_names_defaults_and_stars() -> None:
    assert signature_of(all_parameter_kinds) == "a, b=, *rest, c, d=, **more"
    assert signature_of(by_name_only) == "a, *, c="
    assert signature_of(functools.partial(by_name_only, 1)) == "*, c="


@pytest.mark.parametrize(
    ("symbol", "message"),
    [
        (Symbol("vllm.absent", "x"), "vllm.absent:x is missing: No module"),
        (Symbol("vllm.place", "absent"), "vllm.place:absent is missing"),
        (Symbol("vllm.place", "Thing.absent"), "vllm.place:Thing.absent is missing"),
        (
            Symbol("vllm.place", "Thing.call", "self, b"),
            r"vllm.place:Thing.call has the signature \(self, a\), not \(self, b\)",
        ),
        (Symbol("vllm.place", "number", "self"), "has no signature: it is 7"),
    ],
)
def test_problems_name_missing_or_changed_symbol(symbol: Symbol, message: str) -> None:
    with engine(vllm__place={"Thing": Thing, "number": 7}):
        (problem,) = symbol_problems([symbol, Symbol("vllm.place", "Thing.call", "self, a")])
    assert re.search(message, problem)


class Thing:
    def call(self, a: Any) -> None: ...


def test_problems_are_empty_for_expected_symbols() -> None:
    with engine(vllm__place={"Thing": Thing, "number": 7, "held": SimpleNamespace(x=1)}):
        problems = symbol_problems(
            [
                Symbol("vllm.place", "Thing.call", "self, a"),
                Symbol("vllm.place", "Thing.call"),
                Symbol("vllm.place", "number"),
                Symbol("vllm.place", "held.x"),
            ]
        )
    assert problems == ()
