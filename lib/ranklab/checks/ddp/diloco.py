"""The check of DiLoCo: real optimizers on ranks, with gradients that differ from rank to rank."""

from typing import NamedTuple

import torch
import torch.distributed as dist

from ranklab.checks.prover import GROUPS, AtMost, Proof, Slip, Stage, must_refuse
from ranklab.ddp import DiLoCo
from ranklab.engine import device
from ranklab.meter import Traffic

SHAPES = ((3, 4), (11,), ())  # 24 numbers: 2, 3 and 4 ranks divide them
INNER = {"SGD": lambda groups: torch.optim.SGD(groups, 0.1),
         "SGD with momentum": lambda groups: torch.optim.SGD(groups, 0.1, momentum=0.9),
         "AdamW": lambda groups: torch.optim.AdamW(groups, 0.05)}
STATE, SENT, CALLS = "the inner optimizer's state", "bytes sent", "collectives called"


class Run(NamedTuple):
    """The inner optimizer, H, and the outer step."""

    inner: str
    every: int
    lr: float = 0.7
    momentum: float = 0.9

    def __str__(self):
        return (f"inner {self.inner}, every={self.every}, lr={self.lr:g}, "
                f"momentum={self.momentum:g}")


def _see(cls, run, ranks):
    """Look at all parameters after each step, at what it sends, and at the inner state."""
    parameters = [torch.linspace(-1, 1, max(1, torch.Size(shape).numel())).view(shape).to(device())
                  .requires_grad_() for shape in SHAPES]
    inner = INNER[run.inner]([{"params": parameters[:1]},
                              {"params": parameters[1:], "weight_decay": 0.1}])
    due = 2 * (ranks.size - 1) / ranks.size * sum(p.nbytes for p in parameters)
    trainer = cls(inner, run.every, lr=run.lr, momentum=run.momentum, **ranks.keywords)
    for step in range(2 * run.every + 1):
        for place, p in enumerate(parameters):
            generator = torch.Generator().manual_seed(100 * step + 10 * ranks.index + place)
            p.grad = torch.randn(p.shape, generator=generator).to(device())
        with Traffic() as traffic:
            trainer.step()
        is_due = (step + 1) % run.every == 0
        yield {"the parameters": [p.detach() for p in parameters],
               SENT: AtMost(traffic.sent_bytes, due * is_due,
                            "{:g} bytes are sent in this step; {:g} are enough"),
               CALLS: AtMost(traffic.calls.total(), int(is_due))}
    yield {STATE: [value for p in parameters for _, value in sorted(inner.state[p].items())
                   if isinstance(value, torch.Tensor)]}


def _see_refusal(cls, every, ranks):
    p = torch.zeros(3, device=device(), requires_grad=True)
    yield {"what it raises": must_refuse(cls, torch.optim.SGD([p], 0.1), every)}


class ByHand:
    """Gather all ranks' parameters, and take the outer step as the paper writes it."""

    def __init__(self, inner, every, lr=0.7, momentum=0.9, group=None):
        if every < 1:
            raise ValueError("every")
        self.inner, self.every, self.group, self.number = inner, every, group, 0
        self.lr, self.momentum = lr, momentum
        self.parameters = [p for part in inner.param_groups for p in part["params"]]
        self.outer = [p.detach().double() for p in self.parameters]
        self.velocity = [torch.zeros_like(p) for p in self.outer]

    def step(self):
        self.inner.step()
        self.number += 1
        if self.number % self.every == 0:
            for i, p in enumerate(self.parameters):
                every = [torch.empty_like(p.data) for _ in range(dist.get_world_size(self.group))]
                dist.all_gather(every, p.data, group=self.group)
                delta = self.outer[i] - torch.stack(every).double().mean(0)
                self.velocity[i] = self.momentum * self.velocity[i] + delta
                self.outer[i] -= self.lr * (delta + self.momentum * self.velocity[i])
                p.data.copy_(self.outer[i])


# --- mistakes -------------------------------------------------------------------------------------

CLONE = "p.detach().clone()"
DELTA = "(outer - p).flatten()"
DUE = "        if self.steps % self.every:\n            return\n"
DIVIDE = "        delta /= dist.get_world_size(self.group)\n"
NESTEROV = "nesterov=momentum > 0"
OUTER = "        self.optimizer.step()\n"
COPY = "            p.copy_(outer)\n"
REDUCE = "dist.all_reduce(delta, group=self.group)\n"
RUNS = (Run("SGD", 1, 1.0, 0.0), Run("SGD", 3), Run("AdamW", 2), Run("SGD with momentum", 3, 0.5),
        Run("AdamW", 4, 1.0, 0.0))
DILOCO = Proof(
    DiLoCo,
    Stage({"all parameters after each step on 1 and 3 ranks, with SGD and AdamW inside": (),
           "the inner optimizer's state stays on its rank, and goes on": (STATE,),
           "one all-reduce of the parameters' bytes every H steps, and nothing in between":
           (SENT, CALLS)},
          _see, RUNS, (3, 1), oracle=ByHand),
    Stage("inside a group of ranks", _see, RUNS[1:3], (4,), GROUPS, oracle=ByHand,
          note="On all ranks it was right. Here are groups, whose ranks are not 0 .. n-1."),
    Stage("every=0 is a ValueError", _see_refusal, (0, -1), (1,), oracle=ByHand),
    mistakes=(
        Slip("The model still has its own parameters after the outer step. Keep clones as the "
             "outer parameters, step those, and copy them into the model.",
             (CLONE, "p.detach()"), (COPY, "            pass\n")),
        Slip("The sign is wrong: SGD subtracts the gradient, so delta is the old parameters minus "
             "the new ones.", (DELTA, "(p - outer).flatten()")),
        Slip("all_reduce adds up: divide by the number of ranks.", (DIVIDE, "")),
        Slip("Divide by the ranks of the group, not of all.",
             (DIVIDE, "        delta /= dist.get_world_size()\n")),
        Slip("This is plain momentum. Nesterov adds momentum * velocity to delta once more.",
             (NESTEROV, "nesterov=False")),
        Slip("The outer step has momentum: keep a velocity from one outer step to the next.",
             ("momentum=momentum, nesterov=momentum > 0", "momentum=0.0")),
        Slip("The outer step has a rate of 1 here: pass `lr` to it.",
             ("self.outer, lr,", "self.outer, 1.0,")),
        Slip("The model gets the plain average here, and the outer step is lost: copy the outer "
             "parameters into it.",
             (OUTER, "        means = [outer - outer.grad for outer in self.outer]\n" + OUTER,
              "for p, outer in zip(self.parameters, self.outer):\n" + COPY,
              "for p, mean in zip(self.parameters, means):\n            p.copy_(mean)\n")),
        Slip("Count from the last outer step: the first one comes after H inner steps, not after "
             "the first.", (DUE, DUE.replace("self.steps % self.every",
                                             "(self.steps - 1) % self.every"))),
        Slip("Only every H-th step is an outer step. The steps in between send nothing.",
             (DUE, "")),
        Slip("The gradients of one step are averaged here. DiLoCo averages how far the parameters "
             "have moved in H steps.", (DELTA, "p.grad.flatten()")),
        Slip("The next delta is measured from the last outer parameters. Here it is measured from "
             "the very first ones.",
             (OUTER, "        first = [outer.clone() for outer in self.outer]\n" + OUTER,
              COPY, COPY + "        for outer, old in zip(self.outer, first):\n"
              "            outer.copy_(old)\n")),
        Slip("Do not average the inner optimizer's state: it stays on its rank, and costs bytes "
             "otherwise.",
             (REDUCE, REDUCE + "        for state in self.inner.state.values():\n"
              "            for value in state.values():\n"
              "                if isinstance(value, torch.Tensor):\n"
              "                    dist.all_reduce(value, group=self.group)\n"
              "                    value /= dist.get_world_size(self.group)\n")),
        Slip("Keep the inner optimizer's state through outer steps: do not clear it.",
             (COPY, COPY + "        self.inner.state.clear()\n")),
        Slip("One collective for all parameters: every message costs its latency.",
             (REDUCE, "for part in delta.split([p.numel() for p in self.outer]):\n"
              "            dist.all_reduce(part, group=self.group)\n")),
        Slip("Send delta in the parameters' own dtype: float64 doubles the bytes.",
             ("torch.cat(deltas)", "torch.cat(deltas).double()",
              "part.view_as(outer)", "part.view_as(outer).to(outer.dtype)")),
        Slip("Take the parameters of all param_groups.",
             ("for part in inner.param_groups for p", "for part in inner.param_groups[:1] for p")),
        Slip("Pass `group` on, to all_reduce and to get_world_size.",
             (REDUCE, "dist.all_reduce(delta)\n", DIVIDE,
              "        delta /= dist.get_world_size()\n")),
        Slip("every=0 must be a ValueError, in __init__.", ("if every < 1:", "if False:")),
    ), hints=(
        "What must a rank remember from the last outer step? There are two tensors for each "
        "parameter.",
        "Keep clones of the parameters, and let torch.optim.SGD(clones, lr, momentum=momentum, "
        "nesterov=momentum > 0) step them. Their .grad is the mean of (clone - parameter). "
        "Afterwards copy the clones into the parameters.",
        "self.inner.step(); self.steps += 1; if self.steps % self.every: return; delta = "
        "torch.cat([(outer - p).flatten() ...]); dist.all_reduce(delta, group=self.group); divide "
        "by the ranks; outer.grad = its part, view_as(outer); self.optimizer.step(); "
        "p.copy_(outer)",
    ))
