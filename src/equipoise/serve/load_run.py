"""Runs a load client from a plan to its figures."""

import asyncio
import json
import os
from dataclasses import replace
from typing import NoReturn, TextIO

import aiohttp
from tqdm import tqdm

from equipoise.hal.errors import EquipoiseError
from equipoise.serve.load_client import LoadClient, Target
from equipoise.serve.load_plan import LoadPlan
from equipoise.serve.load_result import LoadResult, Sent, result_of
from equipoise.serve.signals import until_told

PATIENCE = 30.0
"""Seconds for the list of models."""


def run(target: Target, plan: LoadPlan, progress: str, stream: TextIO) -> LoadResult:
    """Send all of it; a bar on `stream` where progress is `shown`.

    Raises: EquipoiseError where a model has to be asked for, and the server names none.
    """
    return asyncio.run(until_told(_run(target, plan, progress, stream)))


async def _run(target: Target, plan: LoadPlan, progress: str, stream: TextIO) -> LoadResult:
    if not target.model:
        # Before the bar: where nobody answers, one line says so.
        target = replace(target, model=await first_model(target))
    bar: tqdm[NoReturn] = tqdm(
        desc="requests", total=plan.workload.count, file=stream, disable=progress != "shown"
    )

    def told(sent: Sent) -> None:
        bar.update()

    try:
        return result_of(await LoadClient(target, told).send(plan))
    finally:
        bar.close()


def _reason(error: Exception) -> str:
    """Of a connection that does not come about, what the system says."""
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno
        return os.strerror(number) if number else str(error.os_error)
    return str(error) or f"nothing came within {PATIENCE:g} s"


async def first_model(target: Target) -> str:
    """The first that a server has. Raises EquipoiseError where it says none."""
    headers = {} if target.key is None else {"Authorization": f"Bearer {target.key}"}
    url = f"{target.url}/v1/models"
    try:
        async with (
            asyncio.timeout(PATIENCE),
            aiohttp.ClientSession(headers=headers) as client,
            client.get(url) as answer,
        ):
            said = await answer.read()
            if answer.status != 200:
                raise EquipoiseError(f"{url} answers {answer.status}: give --model")
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise EquipoiseError(f"{url} does not answer: {_reason(error)}") from error
    try:
        return str(json.loads(said)["data"][0]["id"])
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        raise EquipoiseError(f"{url} names no model: give --model") from None
