"""Reads load reports from the Prometheus pages of workers and hands them to the policy.

Nothing waits for a report: one that fails is counted, and the policy goes on with the last one.
Only lines of wanted metrics are parsed, because a page has many more and is read several times a
second. Format: https://prometheus.io/docs/instrumenting/exposition_formats/, the text one.
"""

import asyncio
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TypeAlias

import aiohttp

from equipoise.balancer.requests.dispatcher import RequestDispatcher
from equipoise.balancer.requests.policy import WorkerReport, WorkerState
from equipoise.serve.settings import ReportSettings, WorkerSettings

LABELS = r'\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\}'
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"')


class InvalidMetrics(Exception):
    """A page that does not say what it was expected to say."""


@dataclass(frozen=True)
class Sample:
    """One line: what is counted, for which labels, and how many there are."""

    name: str
    labels: Mapping[str, str]
    value: float


class MetricsParser:
    """Finds samples of some names.

    Args:
        names: of metrics.
    """

    def __init__(self, names: Sequence[str]) -> None:
        longest_first = sorted(names, key=len, reverse=True)
        either = "|".join(map(re.escape, longest_first))
        self._line = re.compile(rf"^({either})(?:{LABELS})?[ \t]+(\S+)", re.MULTILINE)

    def parse(self, page: str) -> Iterator[Sample]:
        """In their order. Raises `InvalidMetrics` for a value that is no number."""
        for match in self._line.finditer(page):
            labels = dict(LABEL.findall(match[2])) if match[2] else {}
            yield Sample(match[1], labels, _number(match[1], match[3]))


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise InvalidMetrics(f"{name} is {text!r}") from None
    if not isfinite(value) or value < 0:
        raise InvalidMetrics(f"{name} is {text}")
    return value


LOG = logging.getLogger("equipoise.route")
MAX_PAGE = 16 << 20
"""Bytes of a page."""
PIECE = 1 << 16
"""Bytes per read."""
MAX_VALUE = float(1 << 48)
"""A larger value is no count of tokens or requests, and policies take no larger one."""
GeneratedTokens: TypeAlias = Callable[[int, float, int], None]
"""Gets a worker's number, the tokens that it has made so far, and the requests that it runs."""
FAILURES = (TimeoutError, aiohttp.ClientError, OSError, UnicodeDecodeError, InvalidMetrics)


class MetricsScraper:
    """Asks one server, for all workers that it serves as.

    Args:
        client: to ask with.
        workers: of that server, by number.
        dispatcher: gets every report.
        settings: what is asked for, and how often.
        key: sent with the question; None: none is.
        on_generated: told of each worker's counter of tokens, where settings name one.
    """

    def __init__(
        self,
        client: aiohttp.ClientSession,
        workers: dict[int, WorkerSettings],
        dispatcher: RequestDispatcher,
        settings: ReportSettings,
        key: str | None = None,
        on_generated: GeneratedTokens | None = None,
    ) -> None:
        self._client, self._workers, self._dispatcher = client, workers, dispatcher
        self._settings, self._reader = settings, MetricsParser(settings.names)
        self._url = next(iter(workers.values())).url + settings.path
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._on_generated = on_generated
        self._failing = False

    async def run(self) -> None:
        """Read reports until cancelled; lost workers are skipped."""
        while True:
            await asyncio.sleep(self._settings.interval)
            views = self._dispatcher.workers
            if any(views[one].state is not WorkerState.LOST for one in self._workers):
                await self._once()

    async def _once(self) -> None:
        try:
            # All reports before the first is handed on: where a page fails, it fails for all its
            # workers.
            samples = list(self._reader.parse(await self._page()))
            reports = {
                number: worker_report(samples, worker, self._settings)
                for number, worker in self._workers.items()
            }
            generated = self._generated(samples)
        except FAILURES as error:
            self._failed(error)
            return
        if self._failing:
            self._failing = False
            LOG.warning("%s: reports again", self._url)
        for number, report in reports.items():
            # Tokens first: the policy compares the report with what it knows of its own requests.
            if self._on_generated is not None and number in generated:
                self._on_generated(number, generated[number], report.running)
            self._dispatcher.report_worker(number, report)

    def _generated(self, samples: Sequence[Sample]) -> dict[int, float]:
        name = self._settings.generated
        if name is None:
            return {}
        return {
            number: sum(
                _values([one for one in samples if _is_of(one, worker, self._settings)], name)
            )
            for number, worker in self._workers.items()
        }

    async def _page(self) -> str:
        async with (
            asyncio.timeout(self._settings.timeout),
            self._client.get(self._url, headers=self._headers, allow_redirects=False) as answer,
        ):
            if answer.status != 200:
                raise InvalidMetrics(f"it answers {answer.status}")
            page = bytearray()
            while piece := await answer.content.read(PIECE):
                page += piece
                if len(page) > MAX_PAGE:
                    raise InvalidMetrics(f"it is longer than {MAX_PAGE} bytes")
        return page.decode()

    def _failed(self, error: Exception) -> None:
        for number in self._workers:
            self._dispatcher.workers[number].report_failures += 1
        if not self._failing:
            self._failing = True
            why = str(error) or type(error).__name__
            LOG.warning("%s: no report, counted from now on: %s", self._url, why)


def worker_report(
    samples: Sequence[Sample], worker: WorkerSettings, settings: ReportSettings
) -> WorkerReport:
    """What a page says of one worker. Raises `InvalidMetrics` where it does not say all."""
    own = [one for one in samples if _is_of(one, worker, settings)]
    waiting = sum(_values(own, settings.waiting))
    running = sum(_values(own, settings.running))
    usages = [] if settings.kv_usage is None else _values(own, settings.kv_usage)
    usage = sum(usages) / len(usages) if usages else 0.0
    if settings.tokens is not None:
        tokens = sum(_values(own, settings.tokens))
        usage = usage if usages or not worker.kv_tokens else tokens / worker.kv_tokens
    else:
        tokens = usage * (worker.kv_tokens or 0)
    if max(waiting, running, tokens) > MAX_VALUE:
        raise InvalidMetrics("it counts more than there can be")
    return WorkerReport(
        waiting=int(waiting), running=int(running), tokens=int(tokens), kv_usage=usage
    )


def _is_of(sample: Sample, worker: WorkerSettings, settings: ReportSettings) -> bool:
    if settings.rank_label is None or worker.rank is None:
        return True
    return sample.labels.get(settings.rank_label) == str(worker.rank)


def _values(samples: Sequence[Sample], name: str) -> list[float]:
    values = [one.value for one in samples if one.name == name]
    if not values:
        raise InvalidMetrics(f"{name} is not there")
    return values
