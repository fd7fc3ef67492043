"""Attributes of an engine are replaced all or none, once, and can be put back."""

from collections.abc import Callable
from typing import Any

import pytest
from helpers.fakes.fake_vllm import engine

from equipoise.hal.errors import IntegrationError
from equipoise.integrations.vllm.entry import ORIGINAL_ATTRIBUTE
from equipoise.integrations.vllm.patching import Patch, apply_patches, undo_patches


class Thing:
    def call(self) -> str:
        return "theirs"

    @staticmethod
    def alone() -> str:
        return "theirs"


def louder(stock: Callable[..., str]) -> Callable[..., str]:
    def ours(*arguments: Any) -> str:
        return stock(*arguments) + ", then ours"

    return ours


def refusing(stock: object) -> object:
    raise ValueError("cannot be made")


CALL = Patch("vllm.place", "Thing.call", louder)
ALONE = Patch("vllm.place", "Thing.alone", louder)
FUNCTION = Patch("vllm.place", "function", louder)


def place() -> dict[str, Any]:
    return {"Thing": type("Thing", (), dict(vars(Thing))), "function": lambda: "theirs"}


def test_apply_wraps_original_and_undo_restores_it() -> None:
    with engine(vllm__place=place()) as modules:
        there = modules["vllm.place"]
        assert len(apply_patches([CALL, ALONE, FUNCTION])) == 3
        assert there.Thing().call() == there.Thing.alone() == "theirs, then ours"
        assert there.Thing().alone() == there.function() == "theirs, then ours"
        undo_patches([CALL, ALONE, FUNCTION])
        assert there.Thing().call() == there.Thing().alone() == there.function() == "theirs"


def test_apply_twice_patches_once() -> None:
    with engine(vllm__place=place()) as modules:
        assert apply_patches([CALL]) == ("vllm.place:Thing.call",)
        assert apply_patches([CALL]) == ()
        assert modules["vllm.place"].Thing().call() == "theirs, then ours"


def test_apply_patches_nothing_when_one_patch_fails() -> None:
    with engine(vllm__place=place()) as modules:
        failing_patch = Patch("vllm.place", "Thing.alone", refusing)
        with pytest.raises(IntegrationError, match=r"place:Thing.alone cannot .*cannot be made"):
            apply_patches([CALL, FUNCTION, failing_patch])
        there = modules["vllm.place"]
        assert there.Thing().call() == there.function() == "theirs"
        assert not hasattr(there.Thing.call, ORIGINAL_ATTRIBUTE)


def test_apply_refuses_missing_attribute_and_patches_nothing() -> None:
    absent = Patch("vllm.place", "Thing.absent", louder)
    with engine(vllm__place=place()) as modules:
        with pytest.raises(IntegrationError, match=r"Thing\.absent"):
            apply_patches([CALL, absent])
        assert modules["vllm.place"].Thing().call() == "theirs"
