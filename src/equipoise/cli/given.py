"""`equipoise run --placement`: what it goes with, and whether the file is for this model."""

from dataclasses import replace

from equipoise.cli.offline import ranks_asked_for, refused
from equipoise.cli.options import MOVES, OPTIONS, PLANS, RunRequest
from equipoise.cli.validation import MOST_RANKS, check_count
from equipoise.demo.settings import EXPERTS, LAYERS, Balance
from equipoise.hal.errors import UsageError

NEEDLESS = {
    "shares": "the placement has shares of its own",
    "locality": "its shares divide no batch's own counts",
    "step_interval": "nothing is planned anew",
    **{option.key: "nothing is planned anew" for option in OPTIONS if option.group == PLANS},
    **{option.key: "no weight moves" for option in OPTIONS if option.group == MOVES},
}
"""What makes no sense beside a placement that is served unchanged, and why."""


def with_placement(request: RunRequest) -> RunRequest:
    """The request with the slots of its placement, if it has one.

    Raises UsageError where the file is not for this model and these ranks, or something else that
    was asked for cannot be with it.
    """
    path, settings = request.settings.placement, request.settings
    if path is None:
        return request
    _check_wishes(request)
    check_count("--ranks", settings.ranks, MOST_RANKS)
    # Here, not above: numpy takes a moment that other runs need not wait for.
    from equipoise.demo.given import read_fitting

    with refused("--placement"), ranks_asked_for():
        found = read_fitting(path, settings.stage_ranks, LAYERS, EXPERTS)
    if "slots" in request.said and settings.slots != found.slots:
        raise UsageError(f"--placement: has {found.slots} slots, and --slots is {settings.slots}")
    return replace(request, settings=replace(settings, slots=found.slots))


def _check_wishes(request: RunRequest) -> None:
    if request.settings.balance is Balance.OFF:
        raise UsageError("--placement and --no-balance: give one; the unbalanced run is served too")
    for key, why in NEEDLESS.items():
        if key in request.said:
            flag = key.replace("_", "-")
            raise UsageError(f"--{flag} has no meaning with --placement: {why}")
