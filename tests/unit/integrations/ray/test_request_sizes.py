"""Prompt tokens of a call, from whatever its arguments are."""

from array import array
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equipoise.hal.errors import UsageError
from equipoise.integrations.ray.request_sizes import (
    MAX_TOKENS,
    load_request_size,
    prompt_tokens,
)

MESSAGES = [
    {"role": "system", "content": "x" * 8},
    {"role": "user", "content": [{"type": "text", "text": "y" * 12}, {"type": "image_url"}]},
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["prompt", "messages", "content", "text", "n"]), inner)
    ),
    max_leaves=20,
)


@pytest.mark.parametrize(
    ("args", "kwargs", "tokens"),
    [
        ([{"prompt": "x" * 40}], {}, 10),
        ([{"prompt": "x"}], {}, 1),
        ([{"prompt": "三" * 4}], {}, 3),  # twelve bytes
        ([{"prompt": [5, 6, 7]}], {}, 3),
        ([{"prompt": [[5, 6], [7]]}], {}, 3),
        ([{"prompt": ["x" * 8, "y" * 8]}], {}, 4),
        ([{"messages": MESSAGES}], {}, 5),
        ([{"messages": [{"role": "user", "content": None}]}], {}, 1),
        ([{"input": [{"role": "user", "content": "x" * 16}]}], {}, 4),
        ([{"input_ids": [1, 2], "text": "x" * 400}], {}, 2),
        ([SimpleNamespace(prompt=None, messages=[SimpleNamespace(content="x" * 20)])], {}, 5),
        (["x" * 20], {}, 5),
        ([7, {"prompt": "x" * 20}], {}, 5),
        ([], {"prompt": "x" * 20}, 5),
        ([], {"request": {"prompt": [1, 2]}}, 2),
        ([], {"temperature": 1.0}, 1),
        (["an identifier", {"prompt": "x" * 400}], {}, 100),
        ([{"prompt": "x" * 40}, "a longer text" * 40], {}, 130),
        ([], {"user": "abc", "body": {"messages": MESSAGES}}, 5),
        ([], {"prompt": "x" * 40, "messages": MESSAGES}, 10),
        ([{"prompt": b"x" * 40}], {}, 10),
        ([{"messages": [{"content": bytearray(16)}]}], {}, 4),
        ([{"input_ids": np.arange(7)}], {}, 7),
        ([{"input_ids": np.ones((2, 7), dtype=np.int32)}], {}, 14),
        ([SimpleNamespace(input_ids=torch.ones(1, 9, dtype=torch.int64))], {}, 9),
        ([{"input_ids": [np.int64(1), np.int64(2)]}], {}, 2),
        ([{"input_ids": [np.arange(3), np.arange(4)]}], {}, 7),
        ([{"input_ids": array("q", [1, 2, 3])}], {}, 3),
        ([{"input_ids": deque([1, 2])}], {}, 2),
        ([{"input_ids": range(5), "prompt": "x" * 400}], {}, 5),
        ([{"input_ids": np.empty(0, dtype=np.int64), "prompt": "x" * 8}], {}, 2),
        ([{"input": np.ones((3, 8, 8))}], {}, 1),  # a picture
        ([{"input_ids": np.int64(5)}], {}, 1),
        ([b"of the HTTP proxy"], {}, 1),
        ([], {}, 1),
    ],
)
def test_prompt_is_found_in_arguments(args: list[Any], kwargs: dict[str, Any], tokens: int) -> None:
    assert prompt_tokens(args, kwargs) == tokens


@given(args=st.lists(JSON, max_size=3), kwargs=st.dictionaries(st.text(max_size=8), JSON))
def test_any_arguments_have_a_size(args: list[Any], kwargs: dict[str, Any]) -> None:
    assert 1 <= prompt_tokens(args, kwargs) <= MAX_TOKENS


def test_text_is_looked_for_in_bounded_depth() -> None:
    nested: Any = "x" * 400
    for _ in range(10_000):
        nested = [nested]
    assert prompt_tokens([{"messages": nested}], {}) == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_package:size", "does not import: ModuleNotFoundError"),
        (f"{__name__}:MAX_TOKENS", "cannot be called"),
        (f"{__name__}:no_such_function", "does not import: AttributeError"),
    ],
)
def test_size_function_that_is_none_is_refused(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_request_size(name)


def test_size_function_of_a_user_is_loaded() -> None:
    loaded = load_request_size("equipoise.integrations.ray.request_sizes:prompt_tokens")
    assert loaded is prompt_tokens
