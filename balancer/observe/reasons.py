"""Why epochs are aborted, in a closed set of words: what a label of a metric may be.

Reasons are free text: some name ranks, and a peer may say what this version has never heard. A
label must not be: every new value is a new series, on every rank (vLLM's maintainers declined
metrics of its balancer over that, issue 21038).
"""

OTHER = "other"
REASONS = {
    "plans differ": "plans_differ",
    "tables differ": "tables_differ",
    "staged bytes differ": "staged_bytes_differ",
    "ranks out of step": "ranks_out_of_step",
    "out of patience": "out_of_patience",
    "no ballot from rank": "ballot_missing",
    "planner failed": "planner_failed",
    "move failed": "move_failed",
    "a rank still drains": "still_draining",
    "a rank is still in the epoch before": "still_in_epoch",
}
"""How a reason begins, and its label."""
LABELS = (*REASONS.values(), OTHER)


def label_of(reason: str) -> str:
    """One of `LABELS`."""
    found = (label for start, label in REASONS.items() if reason.startswith(start))
    return next(found, OTHER)
