"""Outcomes of requests, and error responses in the API's own shape."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum, unique


@unique
class RequestOutcome(StrEnum):
    """How a request ended; a label of the metrics and a word of the log."""

    COMPLETED = "completed"
    REJECTED_BY_WORKER = "rejected_by_worker"
    """The worker's own 4xx, passed on."""
    BAD_REQUEST = "bad_request"
    UNAUTHORIZED = "unauthorized"
    TOO_LARGE = "too_large"
    OVERLOADED = "overloaded"
    """Back-pressure: too many requests at once, or too many held."""
    QUEUE_TIMEOUT = "queue_timeout"
    WORKERS_FAILED = "workers_failed"
    """Every attempt failed before a token."""
    WORKER_LOST = "worker_lost"
    """The worker was lost, or broke off, after the first token."""
    TIMED_OUT = "timed_out"
    CLIENT_DISCONNECTED = "client_disconnected"
    CLIENT_STALLED = "client_stalled"
    SHUTTING_DOWN = "shutting_down"
    FAILED = "failed"
    """A mistake of the proxy itself."""


@dataclass(frozen=True)
class ErrorResponse:
    """Why a request is not answered as was asked.

    Attributes:
        status: of HTTP.
        outcome: what it counts as.
        message: one line, for people.
        code: for programs.
        headers: that go with the answer.
    """

    status: int
    outcome: RequestOutcome
    message: str
    code: str
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def error_type(self) -> str:
        """The API's word for the family of the error."""
        if self.status == 401:
            return "authentication_error"
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    @property
    def error(self) -> dict[str, str | None]:
        """As the API has it."""
        return {"message": self.message, "type": self.error_type, "param": None, "code": self.code}

    def body(self) -> bytes:
        """As a whole answer."""
        return json.dumps({"error": self.error}).encode()


class RequestRefused(Exception):
    """Raised where a request gets an error response instead of an answer."""

    def __init__(self, error_response: ErrorResponse) -> None:
        super().__init__(error_response.message)
        self.error_response = error_response


RETRY_AFTER = {"Retry-After": "1"}


def bad_request(message: str, status: int = 400, code: str = "invalid_request") -> RequestRefused:
    """The client's to mend."""
    return RequestRefused(ErrorResponse(status, RequestOutcome.BAD_REQUEST, message, code))


def overloaded(message: str) -> RequestRefused:
    """Back-pressure: to be tried again later."""
    return RequestRefused(
        ErrorResponse(429, RequestOutcome.OVERLOADED, message, "overloaded", RETRY_AFTER)
    )
