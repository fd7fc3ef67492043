import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.demo.rank import _as_text


@given(st.text(max_size=12), st.data())
def test_text_cut_anywhere_is_whole_again(text: str, data: st.DataObject) -> None:
    whole = text.encode()
    cut = data.draw(st.integers(0, len(whole)))
    prompt, continuation = _as_text(whole[:cut], whole[cut:])
    assert prompt + continuation == text


@pytest.mark.parametrize("cut", [4, 5])
def test_a_character_that_is_cut_goes_with_the_continuation(cut: int) -> None:
    whole = "漢字".encode()
    assert _as_text(whole[:cut], whole[cut:]) == ("漢", "字")
