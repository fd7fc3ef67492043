"""What is drawn has the published moments, and is the same wherever it is drawn."""

import numpy as np
import pytest

from equipoise.balancer.requests.catalogue import WORKLOADS
from equipoise.balancer.requests.workload import Workload
from equipoise.balancer.requests.workload_generators import LENGTH_SAMPLERS, generate
from equipoise.hal.errors import UsageError

COUNT = 200_000


def generated_workload(name: str) -> Workload:
    """Many requests of a generator, with a seed that no sample has."""
    return generate(name, COUNT, 11)


def truncated_moments() -> tuple[float, float, float, float, float]:
    """Of `prop` by summing over a grid: means and deviations of both, and their correlation."""
    first = np.linspace(0, 3200 + 2600 * 8, 1500)[None, :]
    second = np.linspace(0, 1200 + 700 * 8, 1500)[:, None]
    x, y = (first - 3200) / 2600, (second - 1200) / 700
    weight = np.exp(-(x * x + 0.2 * x * y + y * y) / (2 * (1 - 0.1**2)))
    weight /= weight.sum()
    means = (weight * first).sum(), (weight * second).sum()
    spreads = (
        ((weight * first**2).sum() - means[0] ** 2) ** 0.5,
        ((weight * second**2).sum() - means[1] ** 2) ** 0.5,
    )
    both = ((weight * first * second).sum() - means[0] * means[1]) / (spreads[0] * spreads[1])
    return means[0], means[1], spreads[0], spreads[1], both


def test_prop_workload_is_truncated_normal() -> None:
    workload = generated_workload("prop")
    prompt, output, prompts, outputs, both = truncated_moments()
    assert workload.prompts.mean() == pytest.approx(prompt, rel=0.01)
    assert workload.outputs.mean() == pytest.approx(output, rel=0.01)
    assert workload.prompts.std() == pytest.approx(prompts, rel=0.01)
    assert workload.outputs.std() == pytest.approx(outputs, rel=0.01)
    assert workload.summary().correlation == pytest.approx(both, abs=0.01)
    # What the docstring says.
    assert (prompt, output, prompts, outputs) == pytest.approx((3730, 1254, 2166, 634), rel=2e-3)


def test_prop_workload_above_mean_is_half_normal() -> None:
    prompts = generated_workload("prop").prompts
    excess = np.sort(prompts[prompts > 3200]) - 3200
    # Half of a normal's upper half is below 0.6745 of its deviation; outputs hardly matter here.
    assert np.median(excess) == pytest.approx(0.6745 * 2600, rel=0.02)


def test_az24_workload_has_lognormal_prompts_and_narrow_outputs() -> None:
    workload = generated_workload("az24")
    assert workload.prompts.mean() == pytest.approx(4652, rel=0.01)
    assert np.log(workload.prompts).std() == pytest.approx(0.8, rel=0.01)
    assert workload.outputs.mean() == pytest.approx(1052, rel=0.001)
    assert workload.outputs.std() == pytest.approx(51, rel=0.02)
    assert workload.outputs.min() == 1001


def test_reason_workload_has_short_prompts_and_long_outputs() -> None:
    workload = generated_workload("reason")
    assert workload.prompts.mean() == pytest.approx(803, rel=0.02)
    assert np.log(workload.prompts).std() == pytest.approx(1.0, rel=0.01)
    assert workload.outputs.mean() == pytest.approx(3604, rel=0.02)
    assert np.log(workload.outputs).std() == pytest.approx(1.0, rel=0.01)
    assert (workload.outputs.min() >= 8, workload.outputs.max()) == (True, 32768)


def test_sharegpt_workload_is_capped_with_spread_of_chats() -> None:
    workload = generated_workload("sharegpt")
    summary = workload.summary()
    assert summary.prompts.mean == pytest.approx(156, rel=0.01)
    assert summary.outputs.mean == pytest.approx(321, rel=0.01)
    assert (workload.prompts.min(), workload.outputs.min() >= 4) == (4, True)
    assert (summary.prompts.most, summary.outputs.most) == (1024, 1024)
    # The figures that the sigmas are taken from: p95 / median of BurstGPT's and Azure's chats.
    assert summary.prompts.p95 / summary.prompts.p50 == pytest.approx(1144 / 217, rel=0.03)
    assert summary.outputs.p95 / summary.outputs.p50 == pytest.approx(451 / 129, rel=0.08)


@pytest.mark.parametrize(
    ("name", "prompts", "outputs"),
    [
        ("prop", [1138, 3825, 6829, 4860, 2441, 3033], [1038, 1395, 945, 1657, 1579, 1114]),
        ("az24", [1791, 4095, 741, 10318, 5629, 2674], [1067, 1002, 1047, 1033, 1087, 1143]),
        ("reason", [220, 620, 73, 1967, 922, 364], [1622, 3002, 1695, 1768, 4552, 3707]),
        ("sharegpt", [44, 124, 15, 394, 185, 73], [191, 313, 198, 205, 437, 370]),
    ],
)
def test_generate_draws_same_requests_on_every_machine(
    name: str, prompts: list[int], outputs: list[int]
) -> None:
    workload = generate(name, 6, 2026)
    assert (workload.prompts.tolist(), workload.outputs.tolist()) == (prompts, outputs)


@pytest.mark.parametrize("name", WORKLOADS)
def test_generate_depends_on_seed_only(name: str) -> None:
    assert generate(name, 100, 5).same_requests(generate(name, 100, 5))
    assert not generate(name, 100, 5).same_requests(generate(name, 100, 6))
    assert generate(name, 1, 5).count == 1


def test_generate_covers_every_listed_workload() -> None:
    assert list(LENGTH_SAMPLERS) == list(WORKLOADS)


def test_generate_refuses_bad_arguments() -> None:
    with pytest.raises(UsageError, match=r"no workload is called 'x': there are prop, az24, reaso"):
        generate("x", 1, 0)
    with pytest.raises(UsageError, match="at least one request, not 0"):
        generate("prop", 0, 0)
    with pytest.raises(UsageError, match="a seed is a whole number"):
        generate("prop", 1, -1)
