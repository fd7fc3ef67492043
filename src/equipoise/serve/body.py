"""Reads the body of a request, within limits."""

from aiohttp import web

from equipoise.serve.outcomes import Fault, Outcome, Refused, bad_request, overloaded
from equipoise.serve.scope import Interrupted, Reason, Scope
from equipoise.serve.settings import Limits, Patience

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
LATE = Fault(408, Outcome.TIMED_OUT, Reason.BODY.value, "timeout")


class Bodies:
    """Bounds what the bodies of all requests take together.

    Attributes:
        bytes: kept now.
    """

    def __init__(self, limits: Limits, patience: Patience) -> None:
        self._limits, self._patience = limits, patience
        self.bytes = 0

    async def read(self, request: web.BaseRequest) -> bytes:
        """All of it; to be given back by `forget`.

        Raises: Refused: 413 too long, 408 too slow, 415 compressed, 429 no room, 400 broken.
        """
        self._check_head(request)
        body = bytearray()
        try:
            async with Scope() as scope:
                scope.within(self._patience.body, Reason.BODY)
                while piece := await request.content.readany():
                    body += piece
                    self.bytes += len(piece)
                    self._check(len(body))
        except BaseException as error:
            self.forget(len(body))
            raise _refusal(error) from None
        return bytes(body)

    def forget(self, size: int) -> None:
        """So many bytes are not kept any more."""
        self.bytes -= size

    def _check(self, size: int) -> None:
        if size > self._limits.body:
            raise _too_large(self._limits.body)
        if self.bytes > self._limits.buffered:
            raise overloaded("the proxy has no room for another body")

    def _check_head(self, request: web.BaseRequest) -> None:
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise bad_request("the body has to come as it is", 415, "unsupported_encoding")
        if (request.content_length or 0) > self._limits.body:
            raise _too_large(self._limits.body)
        expected = request.headers.get("Expect")
        if expected is None:
            return
        if expected.lower() != "100-continue":
            raise bad_request("only 100-continue can be expected", 417, "expectation_failed")
        if request.transport is not None:
            request.transport.write(CONTINUE)


def _too_large(most: int) -> Refused:
    message = f"the body is longer than {most} bytes"
    return Refused(Fault(413, Outcome.TOO_LARGE, message, "body_too_large"))


def _refusal(error: BaseException) -> BaseException:
    if isinstance(error, Interrupted):
        return Refused(LATE)
    if isinstance(error, web.RequestPayloadError):
        return bad_request("the body is not framed as HTTP/1.1 frames it")
    return error
