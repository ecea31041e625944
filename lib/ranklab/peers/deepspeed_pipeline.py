"""Train the same GPT with DeepSpeed: PipelineModule over pipeline ranks, ZeRO-1 over data ranks."""

import contextlib
import io

import torch
import torch.nn.functional as F
from torch import nn

from ranklab.data import batch_at
from ranklab.hybrid.layout import Layout
from ranklab.peers.deepspeed_zero import quiet_deepspeed, settings
from ranklab.trainer import decay_groups, learning_rate


def train_with_deepspeed(model, text, config, layout, steps):
    """Train inside launch, on every rank; return [the mean loss of each step].

    DeepSpeed's engine runs the schedule, sums the tied matrix's gradients, clips and steps.
    config: a TrainConfig
    Raises: ValueError for layouts that DeepSpeed can't run, and without zero=1: DeepSpeed 0.19
        would then clip by the norm of only the first stage's gradients.
    """
    if layout != Layout(layout.dp, 1, layout.pp, zero=1):
        raise ValueError(f"{layout}: DeepSpeed's pipeline is compared with zero=1, over data and "
                         "pipeline ranks, and has the schedule 1f1b")
    deepspeed, n_ctx = quiet_deepspeed(), model.config.n_ctx
    deepspeed.init_distributed()  # it uses the existing process groups
    with contextlib.redirect_stdout(io.StringIO()), torch.no_grad():  # it prints its seeds
        module = as_layers(model, layout.pp)
    groups = [{**group, "params": [p for _, p in group["params"]]}
              for group in decay_groups(module, config.weight_decay)]
    more = {"train_micro_batch_size_per_gpu": config.micro_batch,
            "gradient_accumulation_steps": config.batch // layout.dp // config.micro_batch}
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=torch.optim.AdamW(groups, betas=config.betas),
        config=settings(module, layout.zero, clip=config.clip) | more)
    losses = []
    for step in range(steps):
        for group in engine.optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        batch = batch_at(text.train, step, config.batch, n_ctx, config.seed)
        local_batch = [rows[engine.grid.data_parallel_id :: layout.dp] for rows in batch]
        pieces = zip(*(rows.split(config.micro_batch) for rows in local_batch))
        losses.append(engine.train_batch(pieces).item())
    return losses


def as_layers(model, stages):
    """Return a GPT as the list of layers from which DeepSpeed cuts its stages."""
    from deepspeed.pipe import PipelineModule, TiedLayerSpec  # here: takes two seconds

    def token(**options):
        return TiedLayerSpec("token", nn.Embedding, *model.token.weight.shape,
                             _weight=model.token.weight.detach().clone(), **options)

    def loss(logits, targets):
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    head = token(forward_fn=lambda token, x: F.linear(x, token.weight))
    return PipelineModule([token(), *model.blocks.values(), model.norm, head], stages, loss_fn=loss)
