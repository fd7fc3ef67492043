"""The least that a proxy of aiohttp does: it passes bytes on, and knows nothing of them.

    python plain_proxy.py URL

Started by `proxy.py`; says its port on standard output.
"""

import asyncio
import sys

import aiohttp
from aiohttp import web


async def main(target: str) -> None:
    """Serve until killed."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:

        async def relay(request: web.BaseRequest) -> web.StreamResponse:
            body = await request.read()
            async with client.request(request.method, target + request.path, data=body) as answer:
                response = web.StreamResponse(headers={"Content-Type": answer.content_type})
                await response.prepare(request)
                while chunk := await answer.content.readany():
                    await response.write(chunk)
                await response.write_eof()
                return response

        loop = asyncio.get_running_loop()
        server = await loop.create_server(web.Server(relay, access_log=None), "127.0.0.1", 0)
        print(server.sockets[0].getsockname()[1], flush=True)
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
