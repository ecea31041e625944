"""Train a GPT with experts over ranks, and a dense one; report loads, bytes and losses.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from ranklab.basics.options import option
from ranklab.data_parallel.training import DataParallel
from ranklab.engine import device
from ranklab.engine.report import count_ranks
from ranklab.expert_parallel import (
    ExpertParallel, MoEConfig, capacity, combine_tokens, dispatch_tokens, expert_gradients,
    layers_of, load_balance_loss, moe_parameters, moe_traffic, top_k_route,
)
from ranklab.expert_parallel.layer import BALANCE
from ranklab.mesh import build_mesh
from ranklab.models.gpt import GPTConfig
from ranklab.projects.authors import authors
from ranklab.projects.command import ranks_to_come
from ranklab.projects.runner import Drawn, OnRanks, OnText, Resumed
from ranklab.projects.training import Session, large_gpt, new_model, sent_in_a_step, trained_alone
from ranklab.trainer import PRECISIONS
from ranklab.trainer.text import TextTrainer, TrainConfig, text_for

RANKS = 4
PARTS = {"route": top_k_route, "limit": capacity, "dispatch": dispatch_tokens,
         "combine": combine_tokens, "balance_loss": load_balance_loss, "average": expert_gradients}
SAMPLED = 10  # steps from one sample of the loads to the next


@dataclass(frozen=True)
class Config(TrainConfig):
    """The training settings, validated when created. The defaults suit a laptop."""

    steps: int = 100
    batch: int = 32
    micro_batch: int = 8
    eval_batch: int = 64
    n_expert: int = option(16, "of each layer", least=1)
    top_k: int = option(2, "experts of a token", least=1)
    balance: str = option("loss", "of the experts' loads", BALANCE)
    factor: float = option(0.0, "of the capacity; 0: no token is dropped", least=0)
    shared_width: int = option(0, "of an expert that all tokens take; 0: none", least=0)
    ep: int = option(0, "ranks over which experts are spread; 0: all", least=0)
    compare: bool = option(True, "a dense GPT is trained, too")

    def shape(self, dense):
        """Return the GPT with experts; a token uses as much of the MLPs as in `dense`."""
        return MoEConfig(**vars(dense), n_expert=self.n_expert, top_k=self.top_k,
                         balance=self.balance, factor=self.factor, shared_width=self.shared_width,
                         renormalize=self.top_k > 1)


SIZES = {
    "laptop": (GPTConfig(), Config()),
    "gpt2": (large_gpt(n_layer=12, n_head=12, n_embd=768),
             Config(steps=1000, batch=128, micro_batch=4, eval_batch=64, lr=6e-4, n_expert=32,
                    precision="bf16", compare=False)),
}


@dataclass(frozen=True)
class Options(OnRanks, Resumed, OnText, Drawn):
    """The command's options besides Config's."""

    size: str = option("laptop", "of the GPT", SIZES)

    def settings(self):
        return SIZES[self.size][1]


@dataclass(frozen=True)
class Outcome:
    """The results of all ranks together."""

    shape: MoEConfig
    config: Config
    authors: str
    ranks: tuple  # of each rank: {"sent": bytes of rows and counts in a step, "predicted": bytes}
    steps: int
    losses: dict  # {name: held-out nats}
    loads: list  # [(step, [the load of each expert, divided by the mean, of each layer])]
    dropped: float  # part of all choices in a step, at the end


def run(size="laptop", ranks=None, path=None, **arguments):
    """Train both models on all ranks (4 without torchrun); return an Outcome.

    path       a text file of your own
    arguments  fields of Session and Config; a learner's functions for PARTS
    Raises ValueError if ep does not divide the ranks or the experts.
    """
    ranks, (dense, config) = ranks or ranks_to_come(RANKS), SIZES[size]
    session, parts, config = Session.divide({"ranks": ranks} | arguments, PARTS, config)
    text, dense = text_for(dense, config, path)
    shape = config.shape(dense)  # refuses now what all ranks would refuse
    if min(config.batch, config.eval_batch) < ranks:
        raise ValueError(f"batch={config.batch} and eval_batch={config.eval_batch} rows must be at "
                         f"least {ranks}, one for each rank")
    spread = config.ep or ranks
    if ranks % spread or config.n_expert % spread:
        raise ValueError(f"ep={spread} must divide the {ranks} ranks and "
                         f"n_expert={config.n_expert}")
    costs, outcomes = zip(*session.launch(_work, dense, config, text, parts, spread))
    return Outcome(shape, config, authors(parts), costs, **outcomes[0])


def _work(session, dense, config, text, parts, spread):
    """Train and measure the model with experts on each rank; then train the dense one.

    Returns: (costs of this rank, the last fields of an Outcome)
    """
    mesh = build_mesh({"data": dist.get_world_size() // spread, "expert": spread},
                      joined=[("data", "expert")])
    parallel = ExpertParallel(mesh.group(("data", "expert")), mesh.group("expert"),
                              mesh.group("data"), parts["average"])
    trainer = ExpertTrainer(config.shape(dense), text, config, parallel, parts, session.progress)
    session.fit(trainer)
    steps, losses = trainer.steps_done, {"experts": trainer.evaluate()}
    costs, loads = counted(trainer, mesh.group("expert")), trainer.loads
    dropped = parallel.total(torch.stack([(layer.routing["chosen"] < 0).float().mean()
                                          for layer in layers_of(trainer.model)]).mean())
    if config.compare:
        trainer = trained_alone(new_model(dense), text, config, DataParallel(), session.progress)
        losses["dense"] = trainer.evaluate()
    return costs, {"steps": steps, "losses": losses, "loads": loads,
                   "dropped": dropped.item() / parallel.ranks}


class ExpertTrainer(TextTrainer):
    """A TextTrainer that samples the loads of the experts.

    parts  the functions of each MoE layer, or a learner's
    """

    def __init__(self, shape, text, config, parallel, parts, progress):
        model = new_model(shape)
        for layer in layers_of(model):
            vars(layer).update((name, part) for name, part in parts.items() if name != "average")
        super().__init__(model, text, config, device(), parallel=parallel, progress=progress)
        self.loads = []

    def after_step(self, *args):
        if self.steps_done % SAMPLED == 0:
            counts = self.parallel.total(torch.stack([
                layer.routing["wanted"].flatten().bincount(minlength=self.shape.n_expert)
                for layer in layers_of(self.model)]).float())
            self.loads.append((self.steps_done, (counts / counts.mean(1, True)).tolist()))
        super().after_step(*args)


def counted(trainer, group):
    """Do one more step; return {"sent": bytes of its all-to-alls, "predicted": by moe_traffic}."""
    choices, experts = [], trainer.shape.n_expert
    for layer in layers_of(trainer.model):
        layer.dispatch = _recorded(layer.dispatch, choices)
    sent = sent_in_a_step(trainer, "all_to_all")
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    predicted = len(choices) * 8 * experts * (ranks - 1) // ranks  # of each other's counts
    for local_counts in choices:
        counts = [torch.empty_like(local_counts) for _ in range(ranks)]
        dist.all_gather(counts, local_counts, group=group)
        row = PRECISIONS[trainer.config.precision].itemsize * trainer.shape.n_embd
        predicted += moe_traffic(torch.stack(counts), row)[rank].sum().item()
    return {"sent": sent, "predicted": predicted}


def _recorded(dispatch, choices):
    def recorded(x, chosen, n_experts, group=None):
        choices.append(chosen[chosen >= 0].bincount(minlength=n_experts))
        return dispatch(x, chosen, n_experts, group)
    return recorded


# --- the report -----------------------------------------------------------------------------------

def report(outcome):
    """Format the Outcome as text."""
    shape, config, ranks = outcome.shape, outcome.config, len(outcome.ranks)
    parameters, active = moe_parameters(shape)
    most = [max(load) for load in outcome.loads[-1][1]] if outcome.loads else []
    lines = [f"{outcome.steps} steps of {config.batch} x {shape.n_ctx} tokens on "
             f"{count_ranks(ranks)}, {shape.n_expert} experts over {config.ep or ranks}, "
             f"top {shape.top_k}", outcome.authors,
             f"{parameters:,} numbers, of which a token uses {active:,}",
             "rank 0 sends rows and counts in one more step: counted {sent:,} bytes, "
             "said {predicted:,}".format(**outcome.ranks[0]),
             f"the fullest expert of each layer, beside the mean, balanced by {config.balance}: "
             + ", ".join(f"{load:.2f}" for load in most),
             f"choices dropped: {outcome.dropped:.1%}"]
    lines += [f"held out, {name:8} {loss:.3f} nats" for name, loss in outcome.losses.items()]
    return "\n".join(lines)


def figure(outcome):
    """Draw the loads of the experts."""
    from ranklab.plots.expert_parallel import loads  # here: needs matplotlib

    return loads({"": outcome.loads})
