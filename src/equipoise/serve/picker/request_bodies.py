"""Bodies of requests, where Envoy sends them: how much is kept, and how long the prompts are."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from equipoise.serve.body_parser import BodyParser
from equipoise.serve.openai_protocol import BOUND_PATHS, UNREAD_PATHS
from equipoise.serve.outcomes import ErrorResponse, RequestOutcome, RequestRefused, overloaded
from equipoise.serve.picker.settings import PickerLimits
from equipoise.serve.relay import PromptTokenEstimator

LOG = logging.getLogger("equipoise.picker")
PARSED_PATHS = BOUND_PATHS - UNREAD_PATHS


@dataclass(frozen=True)
class PromptSize:
    """How long a prompt is.

    Attributes:
        tokens: given, or estimated by the text, or else by the length of the body.
        text_bytes: of the text that they were estimated by; 0 where it is not known.
        blocks: hashes of its blocks, by which its prefix is known again.
    """

    tokens: int
    text_bytes: int = 0
    blocks: Sequence[int] = ()


class RequestBodies:
    """Of all streams of a picker; to be closed.

    Args:
        limits: of one body, and of all together.

    Attributes:
        buffered_bytes: kept now.
    """

    def __init__(self, limits: PickerLimits) -> None:
        self._limits = limits
        self._estimator, self._parser = PromptTokenEstimator(), BodyParser()
        self.buffered_bytes = 0

    def buffer(self, more: int, length: int) -> None:
        """So many bytes more of a body are kept, of `length` so far; released even if refused.

        Raises: RequestRefused: 413 too long, 429 no room.
        """
        self.buffered_bytes += more
        if length > self._limits.body:
            text = f"the body has more than {self._limits.body} bytes"
            raise RequestRefused(
                ErrorResponse(413, RequestOutcome.TOO_LARGE, text, "body_too_large")
            )
        if self.buffered_bytes > self._limits.buffered:
            raise overloaded("the picker has no room for another body")

    def release(self, size: int) -> None:
        """So many bytes are not kept any more."""
        self.buffered_bytes -= size

    async def prompt_size(self, path: str, body: bytes, content_length: int) -> PromptSize:
        """Of a request to `path`, without its query; of `content_length` if its body is not sent.

        What is wrong with a body the worker says, in its own words.
        """
        if body and path in PARSED_PATHS:
            try:
                # A large one in a process of its own: all streams would wait for it here.
                parsed = await self._parser.parse(path, body, {})
            except RequestRefused as refusal:
                ours = refusal.error_response.outcome is not RequestOutcome.BAD_REQUEST
                level = logging.WARNING if ours else logging.DEBUG
                LOG.log(level, "a body of %d bytes is not read: %s", len(body), refusal)
            else:
                if parsed.prompt_tokens:
                    return PromptSize(parsed.prompt_tokens, blocks=parsed.blocks)
                text = parsed.prompt_bytes
                return PromptSize(self._estimator.estimate(text), text, parsed.blocks)
        return PromptSize(self._estimator.estimate(len(body) or content_length))

    def learn(self, size: PromptSize, tokens: int) -> None:
        """A worker has counted the tokens of a prompt."""
        self._estimator.update(size.text_bytes, tokens)

    async def close(self) -> None:
        """End the process that reads large bodies; bounded."""
        await self._parser.close()
