"""A Llama is fine-tuned on all ranks, and scored before and after."""

import dataclasses
from pathlib import Path

import torch
import torch.distributed as dist

from ranklab import data
from ranklab.checkpoint import RankConsensus
from ranklab.data.instructions import (
    Bytes, alpaca_file, as_batch, encode, plain_text, python_instructions,
)
from ranklab.engine import device, launch
from ranklab.fsdp import (
    FullyShardedBlock, clip_grad_norm_sharded, fsdp2, full_state_dict, masked_loss, wrap_policy,
)
from ranklab.fsdp.pretrained import rows_by_name, rows_in, save_pretrained
from ranklab.meter import memory_of
from ranklab.projects.authors import authors
from ranklab.projects.command import LAUNCH_LIMIT, ranks_to_come
from ranklab.projects.costs import counted_step, median_speed
from ranklab.projects.fsdp import llama
from ranklab.projects.fsdp.config import LLAMAS, SIZES
from ranklab.projects.fsdp.tuner import new_tuner
from ranklab.projects.hugging_face import is_here, offline_transformers

PARTS = {"block": FullyShardedBlock, "clip": clip_grad_norm_sharded, "loss": masked_loss,
         "policy": wrap_policy, "state": full_state_dict}


def run(size="laptop", ranks=4, resume=False, until=None, progress=False, timeout=LAUNCH_LIMIT,
        **changes):  # fmt: skip
    """A Llama is fine-tuned on all ranks; returns a dict for `report`, or None where transformers
    is not installed.

    changes  functions: a learner's own block, clip, loss, policy or state. All others are of
             Config: steps=100, clip=0.5, engine="fsdp2", model="Llama-2-7b", ...
    """
    parts = {name: changes.pop(name) if callable(changes.get(name)) else ours
             for name, ours in PARTS.items()}
    config = dataclasses.replace(SIZES[size], **changes)
    if not is_here():
        return None
    plain, taught = read(config, resume)  # once, for all ranks
    scored_examples(config, taught, ranks_to_come(ranks))  # refuses now, not there
    found = launch(_work, LLAMAS[size], config, parts, plain, taught, resume, until, progress,
                   ranks=ranks, timeout=timeout, stream=progress, preload=llama.PRELOAD)
    # Torch's FSDP shards and gathers by itself, and what is not saved is never gathered.
    by_torch = config.engine == "fsdp2"
    unused = {"block": by_torch, "state": by_torch or not config.save}
    used = {PARTS[name].__name__: part for name, part in parts.items() if not unused.get(name)}
    return {**found[0], "config": config, "ranks": len(found), "authors": authors(used),
            "data": (taught.name, len(taught.train), found[0]["scored"])}


def read(config, resume):
    """(pairs of plain text for a model that knows nothing, the Instructions)."""
    is_new = config.pretrain and not config.model and not resume
    text = data.python_text() if is_new or not config.data else None
    taught = alpaca_file(config.data) if config.data else python_instructions(text)
    n = config.pretrain * config.batch
    return plain_text(text, n, config.n_ctx - 2) if is_new else [], taught


def scored_examples(config, taught, R):
    """How many held-out examples are scored: all ranks must call the model as often.
    error  ValueError where the ranks do not fit
    """
    if config.batch % R:
        raise ValueError(f"{R} ranks must divide batch={config.batch}")
    if config.shard_ranks and R % config.shard_ranks:
        raise ValueError(f"shard_ranks={config.shard_ranks} must divide the {R} ranks")
    if min(config.eval_batch, len(taught.held_out)) < R:
        raise ValueError(f"{R} ranks need a held-out example each: eval_batch="
                         f"{config.eval_batch}, and the data has {len(taught.held_out)}")
    return min(config.eval_batch, len(taught.held_out)) // R * R


def _work(shape, config, parts, plain, taught, resume, until, progress):
    """On each rank: the model gets its weights, is tuned, and saved."""
    torch.manual_seed(0)  # else torchrun's ranks each draw their rows by a seed of their own
    transformers = offline_transformers()
    tokenizer, llama_config = Bytes(), transformers.LlamaConfig(**shape)
    rows = rows_by_name(llama_config.initializer_range)
    if config.model:
        llama_config = transformers.AutoConfig.from_pretrained(config.model)
        rows = rows_in(config.model)
        if any(Path(config.model).glob("tokenizer*")):
            tokenizer = transformers.AutoTokenizer.from_pretrained(config.model)
    scored = scored_examples(config, taught, dist.get_world_size())
    plain, train, held_out = ([encode(pair, tokenizer) for pair in pairs]
                              for pairs in (plain, taught.train, taught.held_out[:scored]))
    trainer = new_tuner(llama_config, config, parts, as_batch(held_out, config.n_ctx), rows,
                        progress)
    if plain:
        first = dataclasses.replace(config, steps=config.pretrain, checkpoint=None)
        trainer.begin(first, plain)
        trainer.fit()
    trainer.begin(config, train)
    found = tune(trainer, resume, until)
    if config.save and not trainer.stopped:
        whole = (fsdp2.full_state if config.engine == "fsdp2" else parts["state"])(trainer.model)
        with RankConsensus(trainer.parallel, device()).agreed():
            if dist.get_rank() == 0:
                save_pretrained(config.save, trainer.model, whole, tokenizer)
    return {**found, "scored": scored}


def tune(trainer, resume, until):
    """What a training to the end, or to step `until`, has shown, on this rank."""
    if resume:
        trainer.resume()
    first, before, costs = trainer.steps_done, trainer.evaluate(), None
    if min(until or trainer.config.steps, trainer.config.steps) - first > 2:
        trainer.step()  # makes the optimizer's state, and shows the order of the blocks
        costs = counted_step(trainer, trainer.optimizer, lambda: memory_of(
            trainer.model, trainer.optimizer))  # of the rank, at the begin of the optimizer's step
    history, after = trainer.fit(until), None
    if not trainer.stopped:  # by a SIGTERM: then there is no time left
        after = history.held_out.get(trainer.steps_done) or trainer.evaluate()
    return {"numbers": trainer.numbers, "costs": costs, "history": history,
            "scores": {first: before, trainer.steps_done: after}, "speed": median_speed(history)}
