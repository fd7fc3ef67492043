"""The report of `equipoise simulate` as a browser would see it."""

import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
from helpers.harnesses.html_pages import Outline, assert_every_text_is_escaped
from helpers.harnesses.html_pages import outline as outline_of

from equipoise.balancer.requests.policy_comparison import Interval, PolicyResult
from equipoise.report.simulation.html import _beside, pictures, relative_text, render_html
from equipoise.report.simulation.json_output import to_json
from equipoise.report.simulation.load_plots import worker_load_plot
from equipoise.report.simulation.plot_style import BEST_COLOURS, REFERENCE_COLOUR, PolicyStyle
from equipoise.report.simulation.result import SimulationResult, Sweep, SweepPoint
from equipoise.report.svg import Picture

pytestmark = pytest.mark.slow

MODULE = "equipoise.report.simulation.html"
TITLES = (
    "Idle at the barrier, and tokens a second",
    "12 steps, worker by worker",
    "Load of every worker",
    "How balanced steps are",
    "Who waits: small requests or large ones",
)


def render(simulation_result: SimulationResult) -> str:
    about = {"command": "equipoise simulate --trace '<b>'", "settings": {"workers": 3}}
    return render_html(simulation_result, about, to_json(simulation_result))


def outline(simulation_result: SimulationResult) -> tuple[str, Outline]:
    page = render(simulation_result)
    return page, outline_of(page)


@pytest.fixture(scope="module")
def whole(simulation_result: SimulationResult) -> tuple[str, Outline]:
    hostile = replace(simulation_result.subject, workload="<script>$x_{$", notes=("\x00<i>",))
    points = (
        SweepPoint(0.5, simulation_result.results),
        SweepPoint(1.0, simulation_result.results),
    )
    return outline(replace(simulation_result, subject=hostile, sweep=Sweep("load", points)))


@pytest.fixture(scope="module")
def plot_pictures(simulation_result: SimulationResult) -> tuple[Picture, ...]:
    return pictures(simulation_result)


def test_simulation_page_has_every_picture_table_and_figure(whole: tuple[str, Outline]) -> None:
    page, parsed = whole
    assert parsed.tags.count("svg") == 6
    for title in (
        *TITLES,
        "From idle to overload",
        "The sweep",
        "Beside fit",
        "What was simulated",
    ):
        assert f"<h2>{title}</h2>" in page
    assert page.count('<div class="tile">') == 4
    for words in ("most tokens a second", "wait_by_size", "each seed draws requests of its own"):
        assert words in parsed.text
    assert len(page.encode()) < 2_000_000


def test_simulation_page_is_self_contained_and_escaped(whole: tuple[str, Outline]) -> None:
    page, parsed = whole
    assert all(load.startswith(("data:", "#")) for load in parsed.loads)
    assert all(link.startswith("#") for link in re.findall(r"url\((.*?)\)", page))
    assert not {"script", "link", "iframe", "i"} & set(parsed.tags)
    assert "--trace '<b>'" in parsed.text
    assert "\x00" not in page


def test_simulation_pictures_have_unique_ids_and_current_color(
    whole: tuple[str, Outline],
) -> None:
    page, _ = whole
    names = re.findall(r' id="([^"]+)"', page)
    assert len(names) == len(set(names))
    assert "currentColor" in page


def test_simulation_pictures_are_well_formed_and_reproducible(
    simulation_result: SimulationResult, plot_pictures: tuple[Picture, ...]
) -> None:
    assert [picture.title for picture in plot_pictures] == list(TITLES)
    assert plot_pictures == pictures(simulation_result)
    for picture in plot_pictures:
        assert ElementTree.fromstring(picture.svg).tag.endswith("svg")


def test_simulation_pictures_name_each_policy(
    simulation_result: SimulationResult, plot_pictures: tuple[Picture, ...]
) -> None:
    for title in (TITLES[0], TITLES[3], TITLES[4]):
        [svg] = [picture.svg for picture in plot_pictures if picture.title == title]
        for label in simulation_result.labels:
            assert re.search(rf">{label}[^<]*</text>", svg), (title, label)


def test_simulation_colours_reference_and_best_three_alone(
    simulation_result: SimulationResult, make_result: Callable[..., PolicyResult]
) -> None:
    results = [make_result(f"p{n}", "throughput", (float(n), n + 0.5)) for n in range(1, 7)]
    results.insert(2, make_result("fit", "throughput", (1.0, 1.5)))
    style = PolicyStyle.of(replace(simulation_result, results=tuple(results)))
    assert style.colours == {
        "fit": REFERENCE_COLOUR,
        **dict(zip(("p6", "p5", "p4"), BEST_COLOURS, strict=True)),
    }
    assert style.colour("p1") == style.colour("unknown") not in style.colours.values()
    assert style.z_order("fit") > style.z_order("p6") > style.z_order("p1")


def test_simulation_page_escapes_every_text(simulation_result: SimulationResult) -> None:
    points = (SweepPoint(0.5, simulation_result.results),)
    whole = replace(simulation_result, sweep=Sweep("load", points))
    assert_every_text_is_escaped(MODULE, lambda: render(whole))


def test_simulation_page_of_one_seed_and_policy(
    simulate_small: Callable[..., SimulationResult],
) -> None:
    _, parsed = outline(simulate_small(seeds=1, policies=("jsq",), workers=1))
    assert parsed.tags.count("svg") == 5
    assert "One seed: no intervals" in parsed.text
    assert "nan" not in parsed.text


def test_simulation_page_without_served_requests(
    simulate_small: Callable[..., SimulationResult],
) -> None:
    _, parsed = outline(simulate_small(kv_tokens=1))
    assert parsed.tags.count("svg") == 1
    assert "no policy makes more tokens a second than another" in parsed.text


def test_simulation_loads_of_many_workers_are_an_image(
    simulate_small: Callable[..., SimulationResult],
) -> None:
    """Lines grow with workers and policies; images do not."""
    picture = worker_load_plot(
        simulate_small(
            workers=20, slots_per_worker=2, requests=300, policies=("random", "jsq", "fit")
        )
    )
    assert picture is not None
    assert "data:image/png" in picture.svg


def test_simulation_loads_of_many_policies_are_few_panels(
    simulate_small: Callable[..., SimulationResult],
) -> None:
    policies = "random", "round_robin", "power_of_two", "jsq", "jsq_load", "br0", "brh", "fit"
    simulation_result = simulate_small(policies=policies)
    picture = worker_load_plot(simulation_result)
    assert picture is not None
    titles = re.findall(r">([\w]+), [\d.]+% idle</text>", picture.svg)
    assert len(titles) == 6
    assert set(PolicyStyle.of(simulation_result).colours) <= set(titles)
    assert "two that idle most" in picture.caption


def test_simulation_verdict_names_few_indistinguishable_policies(
    simulation_result: SimulationResult, make_result: Callable[..., PolicyResult]
) -> None:
    best = make_result("best", "throughput", (2.0, 1.0, 3.0))
    near = [make_result(f"n{n}", "throughput", (1.9, 1.1, 2.9 - n / 100)) for n in range(5)]
    few = replace(
        simulation_result,
        results=(best, near[0], make_result("far", "throughput", (1.8, 0.8, 2.8))),
    )
    many = replace(simulation_result, results=(best, *near))
    assert "cannot be told from it: n0<" in outline(replace(few, plot_data={}))[0]
    assert "cannot be told from it: 5 others<" in outline(replace(many, plot_data={}))[0]


@pytest.mark.parametrize(
    ("values", "words", "verdict_class"),
    [
        ((2.0, 1.0, 3.0), "; no gain over random that chance would not give", ""),
        ((3.0, 2.0, 4.0), " \u00b10.0 % over random", "good"),
    ],
)
def test_simulation_verdict_says_gain_over_random(
    simulation_result: SimulationResult,
    make_result: Callable[..., PolicyResult],
    values: tuple[float, ...],
    words: str,
    verdict_class: str,
) -> None:
    best = make_result("best", "throughput", values)
    noise = make_result(
        "random", "throughput", (1.5, 1.0, 2.0) if verdict_class else (1.9, 1.1, 2.9)
    )
    page, _ = outline(replace(simulation_result, results=(best, noise), plot_data={}))
    assert words in page
    assert f'<div class="verdict {verdict_class}">' in page


@pytest.mark.parametrize(
    ("difference", "text"),
    [
        (-1e-6, "+0.0"),
        (0.034, "+3.4"),
        (-0.5, "-50.0"),
        (8.99, "+899.0"),
        (9.0, "\u00d710"),
        (173.2, "\u00d7174"),
    ],
)
def test_relative_difference_is_multiple_from_ten_times_on(difference: float, text: str) -> None:
    assert relative_text(difference) == text


def test_simulation_difference_of_nothing_has_no_minus_sign() -> None:
    nearly: Any = SimpleNamespace(relative_to=lambda *_: Interval(-1e-6, 1e-6))
    nothing: Any = SimpleNamespace(reference=None, figure="throughput")
    assert _beside(nearly, nothing, nothing) == ("+0.0 \u00b10.0", "alike")
