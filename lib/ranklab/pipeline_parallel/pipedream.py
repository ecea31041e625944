"""PipeDream: 1F1B without an end. The weights change after each backward, and no rank waits."""

from collections import Counter

from ranklab.pipeline_parallel.flush import one_f_one_b_schedule


def pipedream_schedule(stages, micro_batches):
    """The order of 1F1B; what differs is that each B is followed by an update of its stage.

    So there is one warm-up for a whole epoch, and no bubble after it. The price is that a
    micro-batch's backward meets weights that its forward did not use: see stale_weights.
    paper  Harlap et al. 2018, PipeDream (arXiv 1806.03377)
    """
    return one_f_one_b_schedule(stages, micro_batches)


def stale_weights(schedule, stash=True):
    """{action: how often its stage's weights were updated before the ones that it uses}, with an
    update after each B.

    With stash, B uses the weights that its own F used: a copy is kept for each micro-batch in
    flight. Without, B uses the newest ones, and its gradient belongs to no version at all.
    lab    09
    """
    versions = {}
    for actions in schedule:
        updates = Counter()
        for action in actions:
            forward = action._replace(kind="F")
            is_old = stash and action.kind == "B"
            versions[action] = versions[forward] if is_old else updates[action.stage]
            updates[action.stage] += action.kind == "B"
    return versions
