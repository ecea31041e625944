"""Fine-tune a Llama on all ranks, score it before and after, and report."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from ranklab import data
from ranklab.basics.options import existing_file, new_folder, option
from ranklab.data.instructions import (
    alpaca_file, as_batch, encode, plain_text, python_instructions,
)
from ranklab.engine.report import count_ranks
from ranklab.fsdp import (
    FullyShardedBlock, Precision, clip_grad_norm_sharded, fill_shards, full_state_dict,
    hybrid_shard_groups, masked_loss, whole_bytes, wrap_policy,
)
from ranklab.fsdp.memory import predicted_costs
from ranklab.fsdp.pretrained import save_pretrained
from ranklab.fsdp.training import FullyShard
from ranklab.meter import memory_of
from ranklab.peers import fsdp2
from ranklab.projects.authors import authors
from ranklab.projects.command import ranks_to_come
from ranklab.projects.fsdp import llama
from ranklab.projects.hugging_face import INSTALL, is_here
from ranklab.projects.runner import OnRanks, Resumed
from ranklab.projects.training import (
    Session, bytes_table, counted_step, fit_counted, median_speed, must_divide,
)
from ranklab.trainer.text import TrainConfig

PARTS = {"block": FullyShardedBlock, "clip": clip_grad_norm_sharded, "loss": masked_loss,
         "policy": wrap_policy, "state": full_state_dict}
PRECISIONS = {"fp32": Precision(), "bf16": Precision(torch.bfloat16, torch.float32)}
# The arguments of transformers.LlamaConfig, where no folder of weights has them.
LLAMAS = {
    "laptop": {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 176,
               "num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.1},
    "7b": {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
           "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 4096},
}  # fmt: skip


@dataclass(frozen=True)
class Config(TrainConfig):
    """The fine-tuning settings, validated when created. The defaults suit a laptop."""

    model: str | None = option(None, "a Hugging Face folder with safetensors, e.g. Llama-2-7b")
    data: str | None = option(None, "a file in Alpaca's form: instruction, input, output",
                              kind=existing_file)
    save: str | None = option(None, "write the tuned model to this folder, for from_pretrained",
                              kind=new_folder)
    engine: str = option("ours", "fsdp2: torch's fully_shard", ("ours", "fsdp2"))
    pretrain: int = option(40, "steps on plain text first, where there is no --model", least=0)
    steps: int = 120
    batch: int = option(32, "examples in a step, over all ranks")
    micro_batch: int = option(16, "examples in a forward and backward of one rank")
    eval_batch: int = option(192, "held-out examples")
    log_every: int = 10
    n_ctx: int = option(96, "tokens; what an example has beyond them is cut off", least=2)
    lr: float = 3e-3
    weight_decay: float = 0.0
    precision: str = option("fp32", "bf16: what is computed; gradients travel, and rows are "
                            "stepped, in float32", ("fp32", "bf16"))  # fmt: skip
    recompute: bool = option(False, "activation checkpointing: each layer computes twice")
    offload: bool = option(False, "rows, gradients and optimizer to the CPU's memory")
    most_bytes: int = option(0, "of float32 parameters that are whole; 0: as decoder layers need",
                             least=0)  # fmt: skip
    shard_ranks: int = option(0, "ranks that share one copy of the model; 0: all", least=0)

    def __post_init__(self):
        super().__post_init__()
        if self.engine == "fsdp2" and self.shard_ranks:
            raise ValueError("--shard-ranks is for --engine ours")
        if self.model and not Path(self.model, "config.json").exists():
            raise ValueError(f"{self.model} is no folder of a model: it has no config.json")


SIZES = {
    "laptop": Config(),
    "7b": Config(steps=1000, batch=64, micro_batch=1, n_ctx=1024, lr=2e-5, warmup=30,
                 final_lr=0.0, pretrain=0, precision="bf16", recompute=True, offload=True),
}  # fmt: skip


@dataclass(frozen=True)
class Options(OnRanks, Resumed):
    """The command's options besides Config's."""

    size: str = option("laptop", "how to train, and what", SIZES)

    def settings(self):
        return SIZES[self.size]


def run(size="laptop", **arguments):
    """Fine-tune a Llama on all ranks; return a dict for `report`, or None without transformers.

    arguments  fields of Session and Config; a learner's functions for PARTS
    """
    session, parts, config = Session.divide({"ranks": 4} | arguments, PARTS, SIZES[size])
    if not is_here():
        return None
    plain, taught = read(config, session.resume, ranks_to_come(session.ranks))  # for all ranks
    results = session.launch(_work, LLAMAS[size], config, parts, plain, taught,
                             preload=llama.PRELOAD)
    # Torch's FSDP shards and gathers by itself, and what is not saved is never gathered.
    by_torch = config.engine == "fsdp2"
    unused = {"block": by_torch, "state": by_torch or not config.save}
    used = {PARTS[name].__name__: part for name, part in parts.items() if not unused.get(name)}
    return {**results[0], "config": config, "ranks": len(results), "authors": authors(used),
            "data": (taught.name, len(taught.train), len(taught.held_out))}


def read(config, resume, ranks):
    """Return (pairs of plain text for an untrained model, the Instructions).

    The number of held-out examples is a multiple of the ranks: all must call the model equally
    often. Raises ValueError if the ranks do not fit.
    """
    must_divide(ranks, batch=config.batch)
    if config.shard_ranks and ranks % config.shard_ranks:
        raise ValueError(f"shard_ranks={config.shard_ranks} must divide the {ranks} ranks")
    is_new = config.pretrain and not config.model and not resume
    text = data.python_text() if is_new or not config.data else None
    taught = alpaca_file(config.data) if config.data else python_instructions(text)
    n = min(config.eval_batch, len(taught.held_out)) // ranks * ranks
    if not n:
        raise ValueError(f"{ranks} ranks need a held-out example each: eval_batch="
                         f"{config.eval_batch}, and the data has {len(taught.held_out)}")
    pairs = plain_text(text, config.pretrain * config.batch, config.n_ctx - 2) if is_new else []
    return pairs, taught._replace(held_out=taught.held_out[:n])


def _work(session, shape, config, parts, plain, taught):
    """Load the weights, tune and save the model on each rank; no rank ever holds all of it."""
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
    trainer = llama.FineTuner(model, config, as_batch(held_out, config.n_ctx), parts["loss"],
                              parallel, session.progress)
    (fsdp2.fill if by_torch else fill_shards)(model, rows)
    llama.make_buffers(model)
    if plain:
        trainer.begin(dataclasses.replace(config, steps=config.pretrain, checkpoint=None), plain)
        trainer.fit()
    trainer.begin(config, train)
    if session.resume:
        trainer.resume()
    scores = {trainer.steps_done: trainer.evaluate()}
    costs, score = fit_counted(trainer, lambda: counted_step(
        trainer, trainer.optimizer, lambda: memory_of(model, trainer.optimizer)), session.until)
    if config.save and not trainer.stopped:
        whole = (fsdp2.full_state if by_torch else parts["state"])(model)
        if dist.get_rank() == 0:
            save_pretrained(config.save, model, whole, tokenizer)
    return {"numbers": numbers, "costs": costs, "history": trainer.history,
            "scores": scores | {trainer.steps_done: score}, "speed": median_speed(trainer.history)}


def report(results):
    """Format the results of `run` as text; or say what to install."""
    if results is None:
        return INSTALL.format("fsdp")
    config, (model, *blocks) = results["config"], results["numbers"]
    name, train, held_out = results["data"]
    lines = [
        f"model     {config.model or 'a Llama from scratch'}: {model:,} parameters, "
        f"{len(blocks)} blocks of {max(blocks, default=0):,} at most",
        f"data      {name}: {train:,} to train on, {held_out:,} held out",
        f"training  {config.engine}, {count_ranks(results['ranks'])}, {config.steps} steps of "
        f"{config.batch} examples, {config.precision}, {results['speed']:,.0f} examples/s",
        results["authors"]]
    if results["costs"]:  # not where too few steps were done
        [held], peak, sent = results["costs"]
        counts = held.parameters, held.gradients, held.optimizer_state, sent
        formulas = predicted_costs(results["numbers"], config, results["ranks"])
        names = "parameters", "gradients", "optimizer", "sent in a step"
        lines += ["", bytes_table("bytes on rank 0", [
            *zip(names, formulas, counts), ("peak, with activations", None, peak)])]
    lines.append(f"\n{'held out':28}{'loss (nats)':>14}{'exact match':>14}")
    for step, score in results["scores"].items():
        cells = f"{score.loss:14.3f}{score.exact:14.1%}" if score else f"{'stopped':>14}"
        lines.append(f"{f'after step {step}':28}{cells}")
    return "\n".join(lines)
