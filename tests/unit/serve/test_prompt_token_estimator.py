"""Tokens of a prompt are estimated by its bytes, at a ratio that is learnt."""

from hypothesis import given
from hypothesis import strategies as st

from equipoise.serve.openai_protocol import CHAT, COMPLETIONS, MAX_TOKENS, parse_request
from equipoise.serve.relay import MAX_BYTES, PromptTokenEstimator


def test_size_estimate_starts_at_four_bytes_per_token() -> None:
    sizes = PromptTokenEstimator()
    assert [sizes.estimate(n) for n in (0, 1, 4, 5, 4000)] == [1, 1, 1, 2, 1000]


@given(ratio=st.sampled_from([1, 2, 3, 6]), byte_count=st.integers(1 << 20, 1 << 26))
def test_size_estimate_learns_ratio_of_finished_requests(ratio: int, byte_count: int) -> None:
    sizes = PromptTokenEstimator()
    sizes.update(byte_count, byte_count // ratio)
    assert abs(sizes.estimate(100_000) - 100_000 / ratio) <= 0.01 * 100_000


@given(st.lists(st.tuples(st.integers(-3, 1 << 34), st.integers(-3, 1 << 31)), max_size=20))
def test_size_estimate_stays_positive_for_any_input(answers: list[tuple[int, int]]) -> None:
    sizes = PromptTokenEstimator()
    for text, tokens in answers:
        sizes.update(text, tokens)
    assert sizes.estimate(1000) >= 1
    assert sizes.bytes_per_token > 0


def test_size_estimate_follows_changed_traffic() -> None:
    sizes = PromptTokenEstimator()
    for _ in range(8):
        sizes.update(MAX_BYTES // 4, MAX_BYTES // 16)
    for _ in range(12):
        sizes.update(MAX_BYTES // 4, MAX_BYTES // 4)
    assert sizes.estimate(1000) > 900


def test_prompt_size_is_text_bytes_or_token_count() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:..."}}
    parts = [{"type": "text", "text": "abc"}, image]
    messages = f'[{{"role": "user", "content": "数学"}}, {{"role": "user", "content": {parts}}}]'
    body = f'{{"model": "m", "messages": {messages}}}'.replace("'", '"').encode()
    chat = parse_request(CHAT, body, {})
    assert (chat.prompt_tokens, chat.prompt_bytes) == (0, 9)
    for prompt, expected in (
        ('"\\ud800a"', (0, 4)),
        ('["ab", "c"]', (0, 3)),
        ("[1, 2, 3]", (3, 0)),
        ("[[1, 2], [3]]", (3, 0)),
    ):
        request = parse_request(COMPLETIONS, f'{{"model": "m", "prompt": {prompt}}}'.encode(), {})
        assert (request.prompt_tokens, request.prompt_bytes) == expected


def test_size_estimate_bounds_implausible_counts() -> None:
    sizes = PromptTokenEstimator()
    sizes.update(13, MAX_TOKENS)
    assert sizes.estimate(4000) <= 1010
    assert sizes.estimate(1 << 60) == MAX_TOKENS
