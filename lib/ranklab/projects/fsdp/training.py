"""A Llama is fine-tuned on all ranks, and scored before and after."""

import dataclasses

import torch
import torch.distributed as dist

from ranklab import data
from ranklab.data.instructions import (
    alpaca_file, as_batch, encode, plain_text, python_instructions,
)
from ranklab.engine import launch
from ranklab.fsdp import (
    FullyShardedBlock, Precision, clip_grad_norm_sharded, fill_shards, full_state_dict,
    hybrid_shard_groups, masked_loss, whole_bytes, wrap_policy,
)
from ranklab.fsdp.pretrained import save_pretrained
from ranklab.fsdp.training import FullyShard
from ranklab.meter import memory_of
from ranklab.peers import fsdp2
from ranklab.projects.authors import authors
from ranklab.projects.command import LAUNCH_LIMIT, ranks_to_come
from ranklab.projects.fsdp import llama
from ranklab.projects.fsdp.config import LLAMAS, SIZES
from ranklab.projects.fsdp.tuner import FineTuner
from ranklab.projects.hugging_face import is_here
from ranklab.projects.training import counted_step, fit_counted, median_speed

PARTS = {"block": FullyShardedBlock, "clip": clip_grad_norm_sharded, "loss": masked_loss,
         "policy": wrap_policy, "state": full_state_dict}
PRECISIONS = {"fp32": Precision(), "bf16": Precision(torch.bfloat16, torch.float32)}


def run(size="laptop", ranks=4, resume=False, until=None, progress=False, timeout=LAUNCH_LIMIT,
        **changes):  # fmt: skip
    """A Llama is fine-tuned on all ranks; returns a dict for `report`, or None where transformers
    is not installed.

    changes  functions: a learner's block, clip, loss, policy or state. All others are of Config:
             steps=100, clip=0.5, engine="fsdp2", model="Llama-2-7b", ...
    """
    parts = {name: changes.pop(name) if callable(changes.get(name)) else ours
             for name, ours in PARTS.items()}
    config = dataclasses.replace(SIZES[size], **changes)
    if not is_here():
        return None
    plain, taught = read(config, resume, ranks_to_come(ranks))  # once, for all ranks
    found = launch(_work, LLAMAS[size], config, parts, plain, taught, resume, until, progress,
                   ranks=ranks, timeout=timeout, stream=progress, preload=llama.PRELOAD)
    # Torch's FSDP shards and gathers by itself, and what is not saved is never gathered.
    by_torch = config.engine == "fsdp2"
    unused = {"block": by_torch, "state": by_torch or not config.save}
    used = {PARTS[name].__name__: part for name, part in parts.items() if not unused.get(name)}
    return {**found[0], "config": config, "ranks": len(found), "authors": authors(used),
            "data": (taught.name, len(taught.train), len(taught.held_out))}


def read(config, resume, R):
    """(pairs of plain text for a model that knows nothing, the Instructions). Of the held-out ones
    there are as many as R divides: all ranks must call the model equally often.
    error  ValueError where the ranks do not fit
    """
    if config.batch % R:
        raise ValueError(f"{R} ranks must divide batch={config.batch}")
    if config.shard_ranks and R % config.shard_ranks:
        raise ValueError(f"shard_ranks={config.shard_ranks} must divide the {R} ranks")
    is_new = config.pretrain and not config.model and not resume
    text = data.python_text() if is_new or not config.data else None
    taught = alpaca_file(config.data) if config.data else python_instructions(text)
    n = min(config.eval_batch, len(taught.held_out)) // R * R
    if not n:
        raise ValueError(f"{R} ranks need a held-out example each: eval_batch={config.eval_batch}, "
                         f"and the data has {len(taught.held_out)}")
    pairs = plain_text(text, config.pretrain * config.batch, config.n_ctx - 2) if is_new else []
    return pairs, taught._replace(held_out=taught.held_out[:n])


def _work(shape, config, parts, plain, taught, resume, until, progress):
    """On each rank: the model gets its weights, is tuned, and saved. No rank has the whole model at
    any time.
    """
    torch.manual_seed(0)  # else torchrun's ranks each draw their rows by a seed of their own
    model, tokenizer, rows = llama.on_meta(shape, config.model, config.recompute)
    plain, train, held_out = ([encode(pair, tokenizer) for pair in pairs]
                              for pairs in (plain, taught.train, taught.held_out))
    by_torch = config.engine == "fsdp2"
    blocks = parts["policy"](model, config.most_bytes or whole_bytes(model, model.model.layers))
    numbers = [sum(p.numel() for p in module.parameters()) for module in (model, *blocks)]
    parallel = (fsdp2.Fsdp2 if by_torch else FullyShard)(
        groups=hybrid_shard_groups(config.shard_ranks) if config.shard_ranks else None,
        blocks=lambda _: blocks, block=parts["block"], clip=parts["clip"],
        precision=PRECISIONS[config.precision], offload=config.offload)
    trainer = FineTuner(model, config, as_batch(held_out, config.n_ctx), parts["loss"], parallel,
                        progress)
    (fsdp2.fill if by_torch else fill_shards)(model, rows)
    llama.make_buffers(model)
    if plain:
        trainer.begin(dataclasses.replace(config, steps=config.pretrain, checkpoint=None), plain)
        trainer.fit()
    trainer.begin(config, train)
    if resume:
        trainer.resume()
    scores = {trainer.steps_done: trainer.evaluate()}
    costs, score = fit_counted(trainer, lambda: counted_step(
        trainer, trainer.optimizer, lambda: memory_of(model, trainer.optimizer)), until)
    if config.save and not trainer.stopped:
        whole = (fsdp2.full_state if by_torch else parts["state"])(model)
        if dist.get_rank() == 0:
            save_pretrained(config.save, model, whole, tokenizer)
    return {"numbers": numbers, "costs": costs, "history": trainer.history,
            "scores": scores | {trainer.steps_done: score}, "speed": median_speed(trainer.history)}
