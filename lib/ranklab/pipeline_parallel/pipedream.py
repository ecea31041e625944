"""PipeDream: 1F1B without a flush. The weights change after each backward, and no rank waits.

Old weights are kept for the backward of each forward that used them.
"""

from collections import Counter

import torch
from torch.func import functional_call

from ranklab.pipeline_parallel.executor import PipelineExecutor
from ranklab.pipeline_parallel.schedules import one_f_one_b_schedule


def pipedream_schedule(stages, micro_batches):
    """Make a schedule in the order of 1F1B, for an update of the stage after each B.

    So there is one warm-up for a whole epoch, and no bubble after it. The price is that a
    micro-batch's backward uses weights that its forward did not use: see stale_weights.
    Paper: Harlap et al. 2018, PipeDream (arXiv 1806.03377)
    """
    return one_f_one_b_schedule(stages, micro_batches)


def stale_weights(schedule, stash=True):
    """Return which version of its stage's weights each action uses; each B makes the next version.

    The first version is 0. With stash, B uses the weights that its own F used: a copy is kept for
    each micro-batch in flight. Without it, B uses the newest ones, and its gradient belongs to no
    version at all.
    Returns: {action: version}.
    Lab: 09
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


class PipeDreamExecutor(PipelineExecutor):
    """Update a stage's weights after each of its B, by `update(stage)`; without a flush.

    modules: {number of a stage: its module}; they share no parameters.
    stash: whether each B uses the weights of its F: a copy is kept for each micro-batch in
        flight. Without it, B uses the newest weights with activations from old weights.
    versions: {action: the version of the weights that it used}; see stale_weights.
    Cost: memory for one copy of the weights for each micro-batch in flight; that is one more than
        needed, because the newest forward has the newest weights.
    Lab: 09
    """

    def __init__(self, modules, update, last, new_hidden, group=None, stash=True):
        stages = {stage: self.with_copies(stage) for stage in modules}
        super().__init__(stages, last, new_hidden, group)
        self.modules, self.update, self.stash = modules, update, stash
        self.updates, self.versions, self.copies = dict.fromkeys(modules, 0), {}, {}

    def with_copies(self, stage):
        """Return a function that computes the stage with a copy of its weights.

        The gradients go to the copy.
        """

        def forward(x, targets):
            self.newest_copy = {name: p.detach().clone().requires_grad_(p.requires_grad)
                                for name, p in self.modules[stage].named_parameters()}
            return functional_call(self.modules[stage], self.newest_copy, (x, targets, "sum"))

        return forward

    def forward(self, action):
        super().forward(action)
        self.versions[action] = self.updates[action.stage]
        self.copies[action[1:]] = self.newest_copy

    def backward(self, action):
        stage, copy = action.stage, self.copies.pop(action[1:])
        self.versions[action] = self.versions[action._replace(kind="F")]
        parameters = dict(self.modules[stage].named_parameters())
        if not self.stash:
            self.versions[action] = self.updates[stage]
            for name, parameter in parameters.items():
                copy[name].data.copy_(parameter.data)  # .data: autograd would refuse, rightly
        super().backward(action)
        for name, parameter in parameters.items():
            parameter.grad = copy[name].grad
        with torch.no_grad():
            self.update(stage)
        self.updates[stage] += 1
