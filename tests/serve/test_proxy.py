"""Requests through a proxy over real sockets: answers are those of the workers."""

from support.fake_openai import Fake
from support.proxying import asked, proxied, run, tokens_of


def test_an_answer_comes_whole_or_in_events() -> None:
    async def work() -> None:
        async with proxied(Fake("w0")) as site:
            whole = await site.post(asked(3))
            assert (whole.status, whole.text) == (200, "w0:0 w0:1 w0:2 ")
            stream = await site.post(asked(3, stream=True))
            assert tokens_of(stream.body) == ["w0:0 ", "w0:1 ", "w0:2 "]
            assert stream.body.endswith(b"data: [DONE]\n\n")
            assert stream.headers["Content-Type"] == "text/event-stream; charset=utf-8"

    run(work())
