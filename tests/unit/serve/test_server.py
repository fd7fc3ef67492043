"""The proxy as a program: the event loop that it runs on."""

import asyncio
from types import SimpleNamespace

import pytest

from equipoise.serve import server


@pytest.mark.parametrize("installed", [True, False])
def test_server_takes_uvloop_where_it_is_installed(
    installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = SimpleNamespace(new_event_loop=asyncio.new_event_loop)
    monkeypatch.setattr(server, "find_spec", lambda name: module if installed else None)
    monkeypatch.setattr(server, "import_module", {"uvloop": module}.__getitem__)
    assert server.loop_factory() is (asyncio.new_event_loop if installed else None)
