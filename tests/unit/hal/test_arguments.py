"""Checks of arguments: one line with the name and the value."""

import numpy as np
import pytest

from equipoise.hal.arguments import real_number, short_text, whole_number
from equipoise.hal.errors import ConfigError


def test_whole_number_takes_any_integer_type() -> None:
    number = whole_number("n", np.int16(3), ConfigError, least=3, most=3)
    assert (number, type(number)) == (3, int)


@pytest.mark.parametrize("value", [True, 1.0, "1", None, np.float32(1)])
def test_whole_number_refuses_other_types(value: object) -> None:
    with pytest.raises(ConfigError, match=r"^n must be a whole number, got "):
        whole_number("n", value, ConfigError)


def test_real_number_beyond_floating_point_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^n must be a finite number, got 1000.*\.\.\..*000$"):
        real_number("n", 10**400, ConfigError)


def test_short_text_is_one_short_line() -> None:
    text = short_text(np.arange(1000).reshape(500, 2))
    assert "\n" not in text
    assert len(text) <= 50
