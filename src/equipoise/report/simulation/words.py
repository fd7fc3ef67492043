"""What was simulated, in words that the table and the report share."""

import textwrap
from collections.abc import Iterator

from equipoise.balancer.requests.cluster import Cluster
from equipoise.report.forecast_table import counted
from equipoise.report.ink import Ink, Tint, paint
from equipoise.report.simulation.simulated import Simulated, Subject
from equipoise.report.table import printable

WIDTH = 100


def about_lines(found: Simulated, ink: Ink) -> Iterator[str]:
    """Head of the table."""
    subject = found.subject
    yield paint(title(found), Tint.BOLD, ink)
    facts = (*facts_of(subject), *subject.notes)
    for fact in facts:
        for line in folded(printable(fact), WIDTH):
            yield paint(line, Tint.DIM, ink)


def title(found: Simulated) -> str:
    """Who serves what."""
    requests = counted(found.subject.requests.count, "request")
    policies = f"{len(found.results)} polic{'y' if len(found.results) == 1 else 'ies'}"
    served = f"{printable(found.subject.workload)}: {requests} on {workers(found.subject.cluster)}"
    return f"{served}; {policies}, {counted(len(found.seeds), 'seed')}"


def workers(cluster: Cluster) -> str:
    """How many, and how large."""
    room = "" if cluster.kv_tokens is None else f" and {cluster.kv_tokens:,} KV tokens"
    return f"{counted(cluster.workers, 'worker')} of {counted(cluster.slots, 'slot')}{room}"


def facts_of(subject: Subject) -> tuple[str, ...]:
    """A line each: requests, seeds, arrivals, step."""
    prompts, outputs = subject.requests.prompts, subject.requests.outputs
    return (
        f"prompts of {prompts.mean:,.0f} tokens (P95 {prompts.p95:,.0f}), outputs of "
        f"{outputs.mean:,.0f} (P95 {outputs.p95:,.0f})",
        subject.sampling,
        subject.arrivals,
        step_words(subject),
    )


def step_words(subject: Subject) -> str:
    """How long a step takes."""
    step = subject.cluster.step
    full = step.seconds(subject.full_load)
    rates = f"{step.per_token * 1e9:.3g} ns for each token of the fullest worker"
    if step.per_mean:
        rates += f" and {step.per_mean * 1e9:.3g} ns for each of the mean"
    return (
        f"a step takes {step.fixed * 1e3:.3g} ms and {rates}: {full * 1e3:.3g} ms with all slots "
        f"taken, {step.fixed / full:.0%} of it fixed; capacity {subject.capacity:.3g} requests/s"
    )


def sentence(text: str) -> str:
    """With a capital."""
    return text[:1].upper() + text[1:]


def folded(text: str, width: int) -> list[str]:
    """In lines, set in from the second on."""
    return textwrap.wrap(text, width, subsequent_indent="    ", drop_whitespace=True) or [""]
