"""The file of expected violations: what it may say, and what is refused in one line."""

import pytest

from equipoise.hal.conformance.expected_violations import Expectation, Shows, parse_expectations
from equipoise.hal.errors import UsageError

ENTRY = '[[expected]]\nclause = "K5"\nreason = "may time out"\n'
PROPERTY = "result-does-not-block-after-done"
REFUSED = {
    "[[expected": "is not TOML: ",
    "[[expcted]]\n": "unknown key 'expcted': expected [[expected]] and no other",
    'expected = "K5"': "expected tables [[expected]], got expected = 'K5'",
    '[[expected]]\nreason = "r"\n': "[[expected]] number 1: no clause",
    ENTRY + '[[expected]]\nclause = "K99"\nreason = "r"\n': "number 2: unknown clause 'K99'",
    '[[expected]]\nclause = "k5"\nreason = "r"\n': "unknown clause 'k5'; did you mean 'K5'?",
    '[[expected]]\nclause = "K5"\n': "K5: no reason is given",
    '[[expected]]\nclause = "K5"\nreason = " "\n': "K5: no reason is given",
    ENTRY + "link = 5\n": "link must be a text, got 5",
    ENTRY + 'lnk = "x"\n': "unknown key 'lnk'; did you mean 'link'?",
    ENTRY + 'shows = "never"\n': "shows must be always or sometimes, got 'never'",
    ENTRY + 'property = "result-does-not-block"\n': f"did you mean '{PROPERTY}'?",
    ENTRY + 'property = "one-decision-for-all"\n': "one-decision-for-all judges C2, not K5",
    ENTRY + ENTRY: "number 2: K5 is listed twice",
}


def test_expectations_are_read_with_all_keys() -> None:
    text = ENTRY + f'property = "{PROPERTY}"\nlink = "https://x.example/1"\nshows = "sometimes"\n'
    assert parse_expectations(text) == (
        Expectation(
            clause="K5",
            reason="may time out",
            property=PROPERTY,
            link="https://x.example/1",
            shows=Shows.SOMETIMES,
        ),
    )
    assert parse_expectations("") == ()


@pytest.mark.parametrize(("text", "message"), REFUSED.items(), ids=lambda value: repr(value)[:40])
def test_expectations_are_refused_with_one_line(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_expectations(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("clause", ["C8", "R3"])
def test_any_property_may_be_expected_to_hang_or_to_miss_a_method(clause: str) -> None:
    [expected] = parse_expectations(
        f'[[expected]]\nclause = "{clause}"\nproperty = "{PROPERTY}"\nreason = "never reported"\n'
    )
    assert expected.covers(PROPERTY, clause)
    assert not expected.covers(PROPERTY, "K5")
    assert not expected.covers("one-decision-for-all", clause)
