"""How many tokens a prompt has, before anybody has counted them."""

from equipoise.serve.events import MOST_TOKENS

PRIOR_TOKENS, PRIOR_BYTES = 1 << 10, 1 << 12
"""Four bytes a token, until so much has been seen that this is no more than a beginning."""
MOST_BYTES = 1 << 32
"""Beyond it what was seen weighs half, so that traffic that changes is followed."""


class SizeEstimate:
    """Tokens of a text by its bytes in UTF-8, at the ratio of finished requests.

    Bytes and not letters: a letter of Chinese or Japanese is three of them, and most often about
    one token; one of English is one, and a quarter of a token. Whole numbers only, so that the same
    answers in the same order give the same estimates anywhere.
    """

    def __init__(self) -> None:
        self._tokens, self._bytes = PRIOR_TOKENS, PRIOR_BYTES

    def tokens(self, text: int) -> int:
        """Of a text of so many bytes; at least 1."""
        return min(max(1, -(-text * self._tokens // self._bytes)), MOST_TOKENS)

    def learn(self, text: int, tokens: int) -> None:
        """A text of so many bytes had so many tokens.

        What goes beyond a token a byte is not of the text: a picture's, a template's, or a mistake.
        """
        if text < 1 or tokens < 1:
            return
        self._tokens += min(tokens, text)
        self._bytes += text
        if self._bytes > MOST_BYTES:
            self._tokens = max(1, self._tokens // 2)
            self._bytes //= 2

    @property
    def ratio(self) -> float:
        """Bytes of UTF-8 a token."""
        return self._bytes / self._tokens
