"""PipeDream: 1F1B without an end. The weights change after each backward, and no rank waits; old
weights are kept for the backwards of their forwards.
"""

from collections import Counter

import torch
from torch.func import functional_call

from ranklab.pipeline_parallel.executor import PipelineExecutor
from ranklab.pipeline_parallel.schedules import one_f_one_b_schedule


def pipedream_schedule(stages, micro_batches):
    """The order of 1F1B; the difference is that an update of the stage follows each B.

    So there is one warm-up for a whole epoch, and no bubble after it. The price is that a
    micro-batch's backward meets weights that its forward did not use: see stale_weights.
    paper  Harlap et al. 2018, PipeDream (arXiv 1806.03377)
    """
    return one_f_one_b_schedule(stages, micro_batches)


def stale_weights(schedule, stash=True):
    """{action: which version of its stage's weights it uses}; each B makes the next version.

    The first version is 0. With stash, B uses the weights that its own F used: a copy is kept for
    each micro-batch in flight. Without it, B uses the newest, and its gradient belongs to no
    version at all.
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


class PipeDreamExecutor(PipelineExecutor):
    """After each B its stage's weights are updated, by `update(stage)`; no flush.

    modules  {number of a stage: its module}; they share no parameters
    stash    each B uses the weights that its F used: a copy is kept for each micro-batch in flight.
             Without it, B uses the newest weights with the activations of old ones.
    used     {action: the version of the weights that it used}; see stale_weights
    cost     memory for one copy of the weights for each micro-batch in flight; that is one more
             than needed, because the newest forward has the newest weights
    lab      09
    """

    def __init__(self, modules, update, last, new_hidden, group=None, stash=True):
        stages = {stage: self.with_copies(stage) for stage in modules}
        super().__init__(stages, last, new_hidden, group)
        self.modules, self.update, self.stash = modules, update, stash
        self.updates, self.used, self.copies = dict.fromkeys(modules, 0), {}, {}

    def with_copies(self, stage):
        """The stage, computed with a copy of its weights, to which their gradients go."""

        def forward(x, targets):
            self.made = {name: p.detach().clone().requires_grad_(p.requires_grad)
                         for name, p in self.modules[stage].named_parameters()}
            return functional_call(self.modules[stage], self.made, (x, targets, "sum"))

        return forward

    def forward(self, action):
        super().forward(action)
        self.used[action] = self.updates[action.stage]
        self.copies[action[1:]] = self.made

    def backward(self, action):
        stage, copy = action.stage, self.copies.pop(action[1:])
        self.used[action] = self.used[action._replace(kind="F")]
        parameters = dict(self.modules[stage].named_parameters())
        if not self.stash:
            self.used[action] = self.updates[stage]
            for name, parameter in parameters.items():
                copy[name].data.copy_(parameter.data)  # .data: autograd would refuse, rightly
        super().backward(action)
        for name, parameter in parameters.items():
            parameter.grad = copy[name].grad
        with torch.no_grad():
            self.update(stage)
        self.updates[stage] += 1
