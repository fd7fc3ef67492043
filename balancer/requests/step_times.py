"""Step times that others published, so that their figures can be compared."""

from equipoise.balancer.requests.cluster import PER_TOKEN, StepTime
from equipoise.hal.errors import UsageError

DYNTRALB_FIXED, DYNTRALB_BLOCK, BLOCK_TOKENS = 20_000, 19.2, 128
BLOG_MEAN = 0.5


def published(name: str, slots: int, per_token: float = PER_TOKEN) -> StepTime:
    """The step time called `name`, one of `STEP_MODELS` but `share`.

    `bfio` is that of the simulator of BF-IO (arXiv 2601.17855), in seconds: it has a rate of its
    own and goes by `slots`. `blog` is that of DP-BalanceRouter's, at the ratio that it calls
    realistic. `dyntralb` is the cost of vllm-ascend's PR 12292 in units of its own, of blocks that
    have 128 tokens; both are scaled to `per_token` seconds.

    Raises: UsageError for another name.
    """
    if name == "bfio":
        fixed = (slots * 0.6e-3 + 35e-3) / 16
        return StepTime(fixed=fixed, per_token=1.5 * 2 * 576 * 61e-6 / 2**20)
    if name == "blog":
        return StepTime(per_token=per_token, per_mean=BLOG_MEAN * per_token)
    if name == "dyntralb":
        tokens = DYNTRALB_FIXED / (DYNTRALB_BLOCK / BLOCK_TOKENS)
        return StepTime(fixed=tokens * per_token, per_token=per_token)
    raise UsageError(f"no published step time is called {name!r}")
