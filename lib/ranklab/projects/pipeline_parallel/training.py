"""Train a GPT through a pipeline; report its messages, memory, times and bubble."""

import functools
import statistics
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ranklab import pipeline_parallel as pp
from ranklab.basics.options import option, positive
from ranklab.engine import device
from ranklab.meter import Traffic
from ranklab.models.gpt import GPT, GPTConfig
from ranklab.pipeline_parallel.emulated import SleepingStage
from ranklab.pipeline_parallel.stages import gpt_costs, keep_layers
from ranklab.pipeline_parallel.training import PipelineParallel
from ranklab.projects.authors import authors
from ranklab.projects.clock import wait_for_all
from ranklab.projects.command import ranks_to_come
from ranklab.projects.runner import OnRanks, OnText, Resumed
from ranklab.projects.training import Session, large_gpt, new_model, trained_alone
from ranklab.trainer.text import TrainConfig, text_for

PARTS = {"schedule": pp.one_f_one_b_schedule, "split": pp.split_stages,
         "executor": pp.PipelineExecutor}
SCHEDULES = {"gpipe": pp.gpipe_schedule, "1f1b": pp.one_f_one_b_schedule,
             "interleaved": pp.interleaved_schedule, "zb-h1": pp.zero_bubble_schedule,
             "zb-v": pp.zb_v_schedule}  # fmt: skip
SECONDS = 0.03  # that the forward of a mean stage sleeps


def schedule_of(name, virtual=None):
    """Return (ranks, micro_batches) -> schedule. virtual: only for interleaved, 2 by default"""
    if name == "interleaved":
        return functools.partial(SCHEDULES[name], virtual=virtual or 2)
    if virtual is not None:
        raise ValueError(f"--virtual {virtual} is for --schedule interleaved, not for {name}")
    return SCHEDULES[name]


@dataclass(frozen=True)
class Config(TrainConfig):
    """The training settings, validated when created. The defaults suit a laptop."""

    steps: int = 40
    lr: float = 3e-3
    batch: int = 16  # sequences
    micro_batches: int = option(8, "pieces of a batch", least=1)
    eval_batch: int = option(64, "held-out sequences: whole batches")
    compare: bool = option(True, "rank 0 trains the same model alone, too")
    slow_stage: int = option(-1, "this one sleeps twice as long in the emulated run; -1: none",
                             least=-1)

    def __post_init__(self):
        super().__post_init__()
        for name, divisor in (("batch", "micro_batches"), ("eval_batch", "batch")):
            if getattr(self, name) % getattr(self, divisor):
                raise ValueError(f"{name}={getattr(self, name)} must be a multiple of "
                                 f"{divisor}={getattr(self, divisor)}")


SIZES = {  # the laptop's head costs as much as 2.3 blocks, as in GPT-2 XL
    "laptop": (GPTConfig(vocab_size=2048, n_layer=8), Config()),
    "gpt2-xl": (large_gpt(n_layer=48, n_head=25, n_embd=1600),
                Config(steps=200, batch=64, micro_batches=32, lr=2e-4, precision="bf16",
                       compare=False)),
}


@dataclass(frozen=True)
class Options(OnRanks, Resumed, OnText):
    """The command's options besides Config's."""

    size: str = option("laptop", "of the GPT", SIZES)
    schedule: str = option("1f1b", "of micro-batches", SCHEDULES)
    virtual: int | None = option(None, "interleaved: stages of a rank (2)", kind=positive)
    without: ClassVar = ("micro_batch",)  # it follows from micro_batches

    def settings(self):
        return SIZES[self.size][1]


def run(size="laptop", path=None, **arguments):
    """Train the model on all ranks; return a dict for `report`.

    path       a text file of your own
    arguments  fields of Session and Config; a learner's functions for PARTS: see PipelineParallel
    """
    shape, config = SIZES[size]
    session, parts, config = Session.divide({"ranks": 4} | arguments, PARTS, config)
    text, shape = text_for(shape, config, path)
    # refuses what it cannot do
    plan = parts["schedule"](ranks_to_come(session.ranks), config.micro_batches)
    layers = parts["split"](gpt_costs(shape), len(pp.places(plan)))
    if config.slow_stage >= len(layers):
        raise ValueError(f"slow_stage={config.slow_stage} is not one of the {len(layers)} stages")
    return {"ranks": session.launch(_work, shape, config, text, plan, layers, parts),
            "shape": shape, "config": config, "plan": plan, "layers": layers,
            "authors": authors(parts)}


def _work(session, shape, config, text, plan, layers, parts):
    """Train the model on each rank, and measure it."""
    config = replace(config, micro_batch=config.batch // config.micro_batches)
    parallel = PipelineParallel(**parts)
    trainer = session.train(new_model(shape, "meta"), text, config, parallel)
    loss, reference = trainer.history.held_out.get(config.steps), None
    if config.compare and loss and parallel.rank == 0:
        reference = trained_alone(new_model(shape), text, config).history.held_out[config.steps]
    return {"loss": loss, "alone": reference, "steps": trainer.steps_done,
            "parameters": sum(p.numel() for p in trainer.model.parameters()),
            "asleep": asleep(parallel, plan, stage_costs(shape, layers), config.slow_stage),
            **measured_step(trainer, plan)}


def stage_costs(shape, layers):
    """Return the FLOPs of each stage's forward."""
    return [sum(gpt_costs(shape)[layer] for layer in of_stage) for of_stage in layers]


def asleep(parallel, plan, costs, slow_stage):
    """Return this rank's spans in a real run of the schedule `plan`, with stages that sleep."""
    seconds = [SECONDS / statistics.mean(costs) * cost for cost in costs]
    if slow_stage >= 0:
        seconds[slow_stage] *= 2
    last, x = len(costs) - 1, torch.ones(1, device=device())
    stages = {stage: SleepingStage(*[seconds[stage]] * 3, parallel.queue, stage == last)
              for stage in parallel.stages}
    runner = parallel.executor(stages, last, torch.empty_like, None, parallel.queue, timed=True)
    wait_for_all()
    runner.run(plan, [(x, x)] * (1 + max(action.micro_batch for action in plan[0])))
    return runner.spans


def measured_step(trainer, plan):
    """Do one more step; return its spans, and (counted, predicted) messages, bytes, activations."""
    parallel = trainer.parallel

    class Watched(parallel.executor):
        most = 0

        def forward(self, action):
            super().forward(action)
            self.most = max(self.most, len(self.activations) + len(self.weight_queue.pending))

    parallel.executor = functools.partial(Watched, timed=True)
    wait_for_all()
    with Traffic() as traffic:
        trainer.step()
    sent = [op.sent_bytes for op in traffic.ops if op.name == "send"]
    messages = sum(entry.kind[0] == "S" for entry in pp.with_messages(plan)[parallel.rank])
    size = trainer.loop.micro_batch * trainer.n_ctx * parallel.width * parallel.dtype.itemsize
    copies = [p.nbytes for p in parallel.copies]
    return {"spans": parallel.ran.spans, "messages": (len(sent), messages + len(copies)),
            "bytes": (sum(sent), messages * size + sum(copies)),
            "activations": (parallel.ran.most, pp.in_flight_activations(plan)[parallel.rank])}


# --- the report, and the bubble monitor -----------------------------------------------------------

def report(results):
    """Format the results of `run` as text."""
    shape, config, ranks, plan, layers = (
        results[name] for name in ("shape", "config", "ranks", "plan", "layers"))
    first, place = ranks[0], pp.places(plan)
    even = pp.split_stages([0, *[1] * shape.n_layer, 0], len(layers))
    losses = [f"{first[name]:.4f}" if first[name] else "-" for name in ("loss", "alone")]
    lines = [f"{first['steps']} steps of {config.batch} x {shape.n_ctx} tokens in "
             f"{config.micro_batches} micro-batches, {len(layers)} stages", results["authors"],
             "held out: {} nats by the pipeline, {} by one process\n".format(*losses),
             f"rank {'parameters':>13}{'even split':>13}   of messages, bytes, activations: "
             "counted/said"]
    for rank, result in enumerate(ranks):
        naive = parameters(shape, [even[stage] for stage in place if place[stage] == rank])
        counts = ["{:,}/{:,}".format(*result[name])
                  for name in ("messages", "bytes", "activations")]
        lines.append(f"{rank:4} {result['parameters']:13,}{naive:13,}   {'  '.join(counts)}")
    work = [above_mean(stage_costs(shape, split)) for split in (layers, even)]
    lines.append("work of the largest stage: {:.0%} above the mean, in an even split {:.0%}".format(
        *work))
    slow = f", stage {config.slow_stage} twice as long" * (config.slow_stage >= 0)
    for name, title in (("spans", "a real step (where ranks share a core, waits are no bubble)"),
                        ("asleep", f"emulated: stages sleep as long as their FLOPs say{slow}")):
        busy, bubbles = monitor(sum((result[name] for result in ranks), []), plan)
        stage = busy.index(max(busy))
        lines += [f"\n{title}", "busy seconds of each stage: " + " ".join(f"{s:.3f}" for s in busy),
                  "bubble: measured {:.1%}, simulated with these times {:.1%}; "
                  "formula, all stages alike: {:.1%}".format(*bubbles),
                  f"stage {stage} is busy {above_mean(busy):.0%} longer than the mean: it has "
                  f"{layer_names(layers[stage], shape.n_layer)}"]
    return "\n".join(lines)


def monitor(spans, schedule):
    """Return (busy seconds of each stage, bubbles) from the measured spans of all ranks.

    bubbles  measured; simulated with the mean times of each stage; and for equal stages, as
             the formulas predict. The first needs clocks that agree across machines
    """
    seconds, stages = defaultdict(list), range(len(pp.places(schedule)))
    for _, (kind, stage, _), start, end in spans:
        seconds[kind, stage].append(end - start)
    busy = [sum(sum(seconds[kind, stage]) for kind in "FBIW") for stage in stages]
    means = [[statistics.mean(seconds[kind, stage] or [0]) for stage in stages] for kind in "FBIW"]
    timelines = spans, pp.simulate(schedule, *means), pp.simulate(schedule)
    return busy, [pp.bubble_fraction(timeline) for timeline in timelines]


def parameters(shape, ranges):
    """Return the number of parameters in these layers of a GPT."""
    with torch.device("meta"):
        return sum(p.numel() for p in keep_layers(GPT(shape), *ranges).parameters())


def above_mean(values):
    """Return how far the largest value is above the mean, as a fraction of the mean."""
    return max(values) / statistics.mean(values) - 1


def layer_names(layers, n_layer):
    """Return the names of a stage's ends: "embedding to block 1"."""
    names = ["embedding", *(f"block {i}" for i in range(n_layer)), "head"]
    return " to ".join(dict.fromkeys([names[layers[0]], names[layers[-1]]]))
