"""Train a GPT over data, tensor and pipeline ranks; report its costs and bubbles."""

import functools
from collections import defaultdict
from pathlib import Path

import torch

from ranklab import hardware
from ranklab.checkpoint.reshard import reshard_checkpoint
from ranklab.cluster.exporter import Exported, exporting
from ranklab.engine import device, sharing
from ranklab.engine.in_place import is_started_by_another
from ranklab.hybrid import PARTS, Hybrid, layout_memory, layout_traffic
from ranklab.hybrid.counted import counted_step, dry_run, sent_along
from ranklab.pipeline_parallel import PipelineExecutor, bubble_fraction, simulate
from ranklab.pipeline_parallel.stages import gpt_costs
from ranklab.planner.constants import CONSTANTS
from ranklab.projects.authors import authors
from ranklab.projects.hybrid.config import JOBS, SIZES, with_experts
from ranklab.projects.pipeline_parallel.training import layer_names
from ranklab.projects.training import Session, bytes_table, new_model, trained_alone
from ranklab.trainer import PRECISIONS, due
from ranklab.trainer.text import TextTrainer, text_for

# Notebooks of version 1.0 call run(build=..., sync=...).
FIRST_NAMES = {"build": "build_mesh", "parallelize": "parallelize", "sync": "tied_embedding_sync",
               "norm": "mesh_grad_norm"}


def run(size="laptop", layout=None, parts=None, reshard=reshard_checkpoint, shape=None, experts=0,
        export=None, path=None, **arguments):
    """Train the model on all ranks of the layout; return a dict for `report`.

    layout     None: the layout of this size, 2 x 2 x 2 on a laptop
    parts      a learner's functions for hybrid.parts.PARTS, {name: function}
    reshard    reshard_checkpoint, or a learner's own
    shape      a GPTConfig; None: the shape of this size
    experts    how many experts each block has; 0: an MLP
    export     a folder of files by which Prometheus finds each rank's metrics
    path       a text file of your own
    arguments  fields of Session and of Config; and parts by their first names
    """
    first = {FIRST_NAMES[name]: arguments.pop(name) for name in FIRST_NAMES.keys() & arguments}
    usual_shape, config, usual_layout = SIZES[size]
    shape, layout = with_experts(shape or usual_shape, experts), layout or usual_layout
    ranks = None if is_started_by_another() else layout.ranks
    session, _, config = Session.divide({"ranks": ranks} | arguments, {}, config)
    config.refuse_what_does_not_fit(shape, layout)
    text, shape = text_for(shape, config, path)
    learners = first | (parts or {})
    parts = PARTS | learners
    results = session.launch(_work, shape, text, config, layout, parts, reshard, export)
    functions = {name: parts[name] for name in (*FIRST_NAMES.values(), *learners)}
    if session.resume:
        functions["reshard_checkpoint"] = reshard
    return {"ranks": results, "shape": shape, "config": config, "layout": layout,
            "authors": authors(functions)}


def _work(session, shape, text, config, layout, parts, reshard, export):
    """Train on each rank; return its counts, including those of one more step after the last."""
    mesh = layout.new_mesh(parts["build_mesh"], config.per_node or None)
    hybrid = Hybrid(mesh, layout, parts=parts)
    trainer = HybridTrainer(new_model(shape, "meta"), text, config, hybrid, session.progress)
    if session.resume:
        trainer.resume(reshard)
    with exporting(trainer, Path(config.checkpoint or "hybrid").name, export):
        history = trainer.fit(session.until)
    result = {"loss": history.held_out.get(config.steps), "alone": None, "history": history,
              "steps": trainer.steps_done, "bubbles": trainer.bubbles,
              "shown": trainer.shown() if history.steps else {},
              "layers": [*hybrid.pipeline.layers.values()],
              "parameters": sum(p.numel() for p in trainer.model.parameters())}
    if not trainer.stopped:
        held, traffic = counted_step(trainer)
        result |= {"held": held, "messages": traffic.sent_messages,
                   "sent": sent_along(traffic, hybrid.mesh)}
    if config.compare and result["loss"] and hybrid.rank == 0:
        reference = trained_alone(new_model(shape), text, config)
        result["alone"] = reference.history.held_out[config.steps]
    return result


class HybridTrainer(Exported, TextTrainer):
    """A TextTrainer that logs the bubble. A logged step is timed, so it waits for the GPU."""

    def __init__(self, model, text, config, hybrid, progress):
        gpu = device().type == "cuda" and hardware.find(torch.cuda.get_device_name())
        peak = (hybrid.ranks * sharing.share_of_gpu()
                * gpu.peak_flops(PRECISIONS[config.precision])) if gpu else None
        super().__init__(model, text, config, device(), peak_flops=peak, parallel=hybrid,
                         progress=progress)
        self.bubbles = []  # one for each log

    def step(self, batch=None):
        pipeline, is_first = self.parallel.pipeline, not self.history.steps
        timed = is_first or due(self.steps_done + 1, self.loop.log_every)
        pipeline.executor = functools.partial(PipelineExecutor, timed=timed)
        share = super().step(batch)
        self.spans = pipeline.ran.spans if timed else self.spans
        return share

    def log(self, *arguments):
        self.bubbles.append(self.parallel.bubble(self.spans))
        super().log(*arguments)

    @property
    def flops_per_token(self):
        return 3 * sum(gpt_costs(self.shape))  # which knows experts

    def shown(self):
        return {**super().shown(), "bubble": f"{self.bubbles[-1]:.0%}"}


# --- the report -----------------------------------------------------------------------------------

def report(results):
    """Format the results of `run` as text."""
    shape, config, layout, ranks = (
        results[name] for name in ("shape", "config", "layout", "ranks"))
    first, job = ranks[0], config.job(shape)
    loss, reference = (f"{first[name]:.4f}" if first[name] else "-" for name in ("loss", "alone"))
    lines = [f"{first['steps']} steps of {config.batch} x {shape.n_ctx} tokens, {layout}",
             results["authors"], f"held out: {loss} nats by all ranks, {reference} by one process"]
    if first["alone"] and abs(first["loss"] - first["alone"]) > 1e-3:
        lines += ["Ranks add in another order, and each step enlarges the difference. One process",
                  "with another micro-batch drifts, too: compare the losses of the first steps."]
    lines += ["", *who_has_what(ranks, shape.n_layer)]
    if "held" in first:
        lines += costs(job, layout, first["held"], first["sent"])
    if first["shown"]:
        plan = layout.new_schedule()(layout.pp, job.micro_batches(layout))
        bubble = bubble_fraction(simulate(plan), flush=False)
        lines += ["at the last log: " + ", ".join(map(" ".join, first["shown"].items()))
                  + f" ({bubble:.0%} with equal stages)",
                  "(Ranks that share a core wait for it: that is no bubble.)"]
    return "\n".join(lines)


def who_has_what(ranks, n_layer):
    """Return a line for each set of ranks with the same layers and number of parameters."""
    alike = defaultdict(list)
    for rank, result in enumerate(ranks):
        layers = " and ".join(layer_names(stage, n_layer) for stage in result["layers"])
        alike[layers, result["parameters"]].append(rank)
    return [f"ranks {' '.join(map(str, members)):24} {numbers:14,} parameters: {layers}"
            for (layers, numbers), members in alike.items()]


def costs(job, layout, held, sent):
    """Return lines with the bytes of rank 0, by formula and counted."""
    formula = layout_memory(job, layout)
    rows = [(f"held: {name.replace('_', ' ')}", getattr(formula, name), getattr(held, name))
            for name in (*vars(held), "total") if getattr(held, name)]
    rows += [(f"sent in a step: {axis}", nbytes, sent[axis])
             for axis, nbytes in layout_traffic(job, layout).items()]
    return ["", bytes_table("bytes of rank 0", rows), ""]


def dry_run_report(size, job=None, layout=None):
    """Return the bytes that the first rank holds and sends, by formula and counted, as text.

    size  a name in SIZES; its job and layout are the defaults
    """
    job, layout = job or JOBS[size], layout or SIZES[size][2]
    held, sent = dry_run(job, layout)
    needs = (held.total + CONSTANTS.context_bytes) / 1e9
    fits = "fits" if needs <= 80 else "does not fit"
    return "\n".join([
        f"{size} on {layout.ranks} GPUs: {layout}, {job.micro_batches(layout)} micro-batches",
        *costs(job, layout, held, sent),
        f"With CUDA and NCCL that is {needs:.1f} GB: it {fits} in 80 GB."])
