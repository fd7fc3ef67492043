"""Runs a load client from a plan to its figures."""

import asyncio
import json
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
    bar: tqdm[NoReturn] = tqdm(
        desc="requests", total=plan.workload.count, file=stream, disable=progress != "shown"
    )
    try:
        return asyncio.run(until_told(_run(target, plan, bar)))
    finally:
        bar.close()


async def _run(target: Target, plan: LoadPlan, bar: "tqdm[NoReturn]") -> LoadResult:
    if not target.model:
        target = replace(target, model=await first_model(target))

    def told(sent: Sent) -> None:
        bar.update()

    return result_of(await LoadClient(target, told).send(plan))


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
        raise EquipoiseError(f"{url} does not answer: {error}") from error
    try:
        return str(json.loads(said)["data"][0]["id"])
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        raise EquipoiseError(f"{url} names no model: give --model") from None
