"""One request on its way from its client to a worker and back."""

from dataclasses import dataclass

from aiohttp import web

from equipoise.serve.asked import Asked
from equipoise.serve.call import Call
from equipoise.serve.ticket import Ticket


@dataclass(frozen=True)
class Errand:
    """What belongs to one request.

    Attributes:
        request: the client's.
        asked: what it wants.
        call: what is noted of it.
        ticket: as the desk has it.
        end: loop's time by which it has to be over.
    """

    request: web.BaseRequest
    asked: Asked
    call: Call
    ticket: Ticket
    end: float
