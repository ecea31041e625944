"""PipeDream on real ranks: an update after each backward, and old weights kept for its forward."""

import torch
from torch.func import functional_call

from ranklab.pipeline_parallel.executor import PipelineExecutor


class PipeDreamExecutor(PipelineExecutor):
    """After each B its stage's weights are updated, by `update(stage)`; no flush.

    modules  {number of a stage: its module}; they share no parameters
    stash    each B uses the weights that its F used, of which a copy is kept for each micro-batch
             in flight. Without, it uses the newest weights with the activations of old ones.
    used     {action: how often the weights that it used had been updated}; see stale_weights
    cost     memory for as many copies of the weights as micro-batches are in flight, one more than
             needed: that of the newest forward has the newest weights
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
