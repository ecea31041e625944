"""A GPT with experts is trained over ranks, and a dense one; loads, bytes and losses are seen."""

import dataclasses
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ranklab.data_parallel.training import DataParallel
from ranklab.engine import device, launch
from ranklab.expert_parallel import (
    ExpertParallel, MoEConfig, capacity, combine_tokens, dispatch_tokens, expert_gradients,
    layers_of, load_balance_loss, moe_gpt, moe_traffic, top_k_route,
)
from ranklab.mesh import build_mesh
from ranklab.meter import Traffic
from ranklab.models.gpt import GPT
from ranklab.projects.authors import authors
from ranklab.projects.command import LAUNCH_LIMIT, ranks_to_come
from ranklab.projects.expert_parallel.config import RANKS, SIZES, Config
from ranklab.trainer import PRECISIONS
from ranklab.trainer.text import TextTrainer, text_for

WATCHED = 10  # steps from one look at the loads to the next


@dataclass(frozen=True)
class Found:
    """What all ranks have seen together."""

    shape: MoEConfig
    config: Config
    authors: str
    ranks: list  # of each rank: {"sent": bytes of rows and counts in a step, "said": bytes}
    steps: int
    losses: dict  # {name: held-out nats}
    loads: list  # [(step, [the load of each expert beside the mean, of each layer])]
    dropped: float  # part of all choices in a step, at the end


def run(size="laptop", ranks=RANKS, route=top_k_route, limit=capacity, dispatch=dispatch_tokens,
        combine=combine_tokens, balance_loss=load_balance_loss, average=expert_gradients,
        path=None, resume=False, until=None, progress=False, timeout=LAUNCH_LIMIT,
        **changes):  # fmt: skip
    """Both models are trained on all ranks; returns a Found.

    route ... average  a learner's own will do
    path     a text of your own
    changes  of Config: steps=100, balance="bias", ...
    error    ValueError where ep does not divide the ranks or the experts
    """
    dense, config = SIZES[size]
    config = dataclasses.replace(config, **changes)
    text, dense = text_for(dense, config, path)
    shape, R = config.shape(dense), ranks_to_come(ranks)  # refuses now what all ranks would refuse
    if min(config.batch, config.eval_batch) < R:
        raise ValueError(f"batch={config.batch} and eval_batch={config.eval_batch} rows must be at "
                         f"least {R}, one for each rank")
    spread = config.ep or R
    if R % spread or config.n_expert % spread:
        raise ValueError(f"ep={spread} must divide the {R} ranks and n_expert={config.n_expert}")
    parts = {"route": route, "limit": limit, "dispatch": dispatch, "combine": combine,
             "balance_loss": balance_loss}
    found = launch(_work, dense, config, text, parts, average, spread, resume, until, progress,
                   ranks=ranks, timeout=timeout, stream=progress)
    first = found[0].pop("first")
    return Found(shape, config, authors(parts | {"average": average}), found, **first)


def _work(dense, config, text, parts, average, spread, resume, until, progress):
    """On each rank: the model with experts is trained and looked at; then the dense one."""
    mesh = build_mesh({"data": dist.get_world_size() // spread, "expert": spread},
                      joined=[("data", "expert")])
    parallel = ExpertParallel(mesh.group(("data", "expert")), mesh.group("expert"),
                              mesh.group("data"), average)
    trainer = ExpertTrainer(config.shape(dense), text, config, parallel, parts, progress)
    if resume:
        trainer.resume()
    trainer.fit(until)
    steps, loads = trainer.steps_done, trainer.loads
    losses = {"experts": trainer.evaluate()}
    seen = counted(trainer, mesh.group("expert"))
    dropped = parallel.total(torch.stack([(layer.seen["chosen"] < 0).float().mean()
                                          for layer in layers_of(trainer.model)]).mean())
    if config.compare:
        losses["dense"] = train_dense(dense, text, config, progress).evaluate()
    if dist.get_rank() == 0:
        seen["first"] = {"steps": steps, "losses": losses, "loads": loads,
                         "dropped": dropped.item() / parallel.ranks}
    return seen


def train_dense(shape, text, config, progress):
    """The trainer of a GPT with MLPs in the place of experts, trained on the same batches."""
    torch.manual_seed(0)
    config = dataclasses.replace(config, checkpoint=None)
    trainer = TextTrainer(GPT(shape), text, config, device(), parallel=DataParallel(),
                          progress=progress)
    trainer.fit()
    return trainer


class ExpertTrainer(TextTrainer):
    """A TextTrainer that keeps the loads of the experts.

    parts  of each MoE layer: a learner's own functions
    """

    def __init__(self, shape, text, config, parallel, parts, progress):
        torch.manual_seed(0)
        model = moe_gpt(shape)
        for layer in layers_of(model):
            vars(layer).update(parts)
        super().__init__(model, text, config, device(), parallel=parallel, progress=progress)
        self.loads = []

    def after_step(self, *args):
        if self.steps_done % WATCHED == 0:
            counts = self.parallel.total(torch.stack([
                layer.seen["wanted"].flatten().bincount(minlength=self.shape.n_expert)
                for layer in layers_of(self.model)]).float())
            self.loads.append((self.steps_done, (counts / counts.mean(1, True)).tolist()))
        super().after_step(*args)


def counted(trainer, group):
    """{"sent": bytes of all all-to-alls in a step, "said": by moe_traffic, of what was chosen}"""
    noted, E = [], trainer.shape.n_expert
    for layer in layers_of(trainer.model):
        layer.dispatch = _noting(layer.dispatch, noted)
    with Traffic() as traffic:
        trainer.step()
    R, rank = dist.get_world_size(group), dist.get_rank(group)
    said = len(noted) * 8 * E * (R - 1) // R  # the counts that ranks tell each other
    for mine in noted:
        counts = [torch.empty_like(mine) for _ in range(R)]
        dist.all_gather(counts, mine, group=group)
        row = PRECISIONS[trainer.config.precision].itemsize * trainer.shape.n_embd
        said += moe_traffic(torch.stack(counts), row)[rank].sum().item()
    sent = sum(op.sent_bytes for op in traffic.ops if op.name == "all_to_all")
    return {"sent": sent, "said": said}


def _noting(dispatch, noted):
    def noting(x, chosen, n_experts, group=None):
        noted.append(chosen[chosen >= 0].bincount(minlength=n_experts))
        return dispatch(x, chosen, n_experts, group)
    return noting
