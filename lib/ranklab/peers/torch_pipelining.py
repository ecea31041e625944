"""A step with torch.distributed.pipelining, on the stages of our PipelineParallel."""

import torch
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from ranklab.engine import device

TORCH_SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B",
                   "zb-h1": "InterleavedZeroBubble", "zb-v": "ZBVZeroBubble"}


def torch_step(parallel, name, pieces):
    """Make a step: (tokens, targets) -> this rank's share of the mean loss, after backward.

    parallel: a PipelineParallel that has been applied, with the schedule `name`
    """
    stages = [PipelineStage(part, stage, len(parallel.place), device())
              for stage, part in parallel.stages.items()]
    kind = get_schedule_class(TORCH_SCHEDULES[name])
    schedule = kind(stages[0] if issubclass(kind, PipelineScheduleSingle) else stages, pieces,
                    loss_fn=lambda logits, targets: F.cross_entropy(
                        logits.flatten(0, 1), targets.flatten()) / pieces, scale_grads=False)

    def step(x, y):
        losses = []
        schedule.step(*[x] if 0 in parallel.stages else [], target=y, losses=losses)
        return sum(losses, torch.zeros((), device=device()))

    return step
