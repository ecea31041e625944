"""A Llama is fine-tuned on all ranks, and scored before and after."""

import dataclasses
from pathlib import Path

import torch
import torch.distributed as dist

from ranklab import data
from ranklab.checkpoint import RankConsensus
from ranklab.engine import device, launch
from ranklab.fsdp import (
    FullyShardedBlock, clip_grad_norm_sharded, full_state_dict, masked_loss, wrap_policy,
)
from ranklab.meter import memory_of
from ranklab.projects.authors import authors
from ranklab.projects.command import LAUNCH_LIMIT, ranks_to_come
from ranklab.projects.costs import counted_step, median_speed
from ranklab.projects.fsdp import fsdp2, llama
from ranklab.projects.fsdp.config import LLAMAS, SIZES
from ranklab.projects.fsdp.instructions import (
    Bytes, alpaca_file, as_batch, encode, plain_text, python_instructions,
)
from ranklab.projects.fsdp.tuner import new_tuner

PARTS = {"block": FullyShardedBlock, "clip": clip_grad_norm_sharded, "loss": masked_loss,
         "policy": wrap_policy, "state": full_state_dict}


def run(size="laptop", ranks=4, resume=False, until=None, progress=False, timeout=LAUNCH_LIMIT,
        **changes):  # fmt: skip
    """A Llama is fine-tuned on all ranks; returns a dict for `report`, or None where transformers
    is not installed.

    changes  functions: a learner's own block, clip, loss, policy or state. All others are of
             Settings: steps=100, clip=0.5, engine="fsdp2", model="Llama-2-7b", ...
    """
    parts = {name: changes.pop(name) if callable(changes.get(name)) else ours
             for name, ours in PARTS.items()}
    settings = dataclasses.replace(SIZES[size], **changes)
    if not llama.is_here():
        return None
    plain, taught = read(settings, resume)  # once, for all ranks
    scored_examples(settings, len(taught.held_out), ranks_to_come(ranks))  # refuses now, not there
    found = launch(_work, LLAMAS[size], settings, parts, plain, taught, resume, until, progress,
                   ranks=ranks, timeout=timeout, stream=progress, preload=llama.PRELOAD)
    # Torch's FSDP shards and gathers by itself, and what is not saved is never gathered.
    by_torch = settings.engine == "fsdp2"
    unused = {"block": by_torch, "state": by_torch or not settings.save}
    used = {name: part for name, part in parts.items() if not unused.get(name)}
    return {**found[0], "settings": settings, "ranks": len(found),
            "authors": authors({PARTS[name].__name__: used[name] for name in used}),
            "data": (taught.name, len(taught.train), found[0]["scored"])}


def read(settings, resume):
    """(pairs of plain text for a model that knows nothing, the Instructions)."""
    is_new = settings.pretrain and not settings.model and not resume
    text = data.python_text() if is_new or not settings.data else None
    taught = alpaca_file(settings.data) if settings.data else python_instructions(text)
    n = settings.pretrain * settings.batch
    return plain_text(text, n, settings.n_ctx - 2) if is_new else [], taught


def _work(shape, settings, parts, plain, taught, resume, until, progress):
    """On each rank: the model gets its weights, is tuned, and saved."""
    torch.manual_seed(0)  # else torchrun's ranks each draw their rows by a seed of their own
    transformers = llama.offline_transformers()
    tokenizer, config = Bytes(), transformers.LlamaConfig(**shape)
    rows = llama.rows_by_name(config.initializer_range)
    if settings.model:
        config = transformers.AutoConfig.from_pretrained(settings.model)
        rows = llama.rows_in(settings.model)
        if any(Path(settings.model).glob("tokenizer*")):
            tokenizer = transformers.AutoTokenizer.from_pretrained(settings.model)
    scored = scored_examples(settings, len(taught.held_out), dist.get_world_size())
    plain, train, held_out = ([encode(pair, tokenizer) for pair in pairs]
                              for pairs in (plain, taught.train, taught.held_out[:scored]))
    held_out = as_batch(held_out, settings.n_ctx)
    trainer = new_tuner(config, settings, parts, held_out, rows, progress)
    if plain:
        first = dataclasses.replace(settings, steps=settings.pretrain, checkpoint=None)
        trainer.begin(first, plain)
        trainer.fit()
    trainer.begin(settings, train)
    found = tune(trainer, resume, until)
    if settings.save and not trainer.stopped:
        save(trainer, parts["state"], tokenizer)
    return found


def scored_examples(settings, held_out, R):
    """How many held-out examples are scored: all ranks must call the model as often.
    error  ValueError where the ranks do not fit
    """
    if settings.batch % R:
        raise ValueError(f"{R} ranks must divide batch={settings.batch}")
    if settings.shard_ranks and R % settings.shard_ranks:
        raise ValueError(f"shard_ranks={settings.shard_ranks} must divide the {R} ranks")
    if min(settings.eval_batch, held_out) < R:
        raise ValueError(f"{R} ranks need a held-out example each: eval_batch="
                         f"{settings.eval_batch}, and the data has {held_out}")
    return min(settings.eval_batch, held_out) // R * R


def tune(trainer, resume, until):
    """What a training to the end, or to step `until`, has shown, on this rank."""
    settings = trainer.settings
    if resume:
        trainer.resume()
    first, before, costs = trainer.steps_done, trainer.evaluate(), None
    if min(until or settings.steps, settings.steps) - first > 2:
        trainer.step()  # makes the optimizer's state, and shows the order of the blocks
        costs = counted_step(trainer, trainer.optimizer, lambda: memory_of(
            trainer.model, trainer.optimizer))  # of the rank, at the begin of the optimizer's step
    history = trainer.fit(until)
    after = None  # stopped by a SIGTERM: there is no time left
    if not trainer.stopped:
        after = history.held_out.get(trainer.steps_done) or trainer.evaluate()
    scores = {first: before, trainer.steps_done: after}
    return {"numbers": trainer.numbers, "costs": costs, "history": history, "scores": scores,
            "scored": len(trainer.held_out[0]),
            "speed": median_speed(history)}


def save(trainer, state, tokenizer):
    """settings.save has the model as Hugging Face stores it, written by rank 0."""
    settings = trainer.settings
    whole = (fsdp2.full_state if settings.engine == "fsdp2" else state)(trainer.model)
    with RankConsensus(trainer.parallel, device()).agreed():
        if dist.get_rank() == 0:
            llama.save_pretrained(settings.save, trainer.model, whole, tokenizer)
