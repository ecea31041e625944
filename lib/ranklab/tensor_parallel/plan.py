"""A model over the ranks of a group, changed from outside: which module is split, and in which way.

    tensor_parallel(model, {"token": vocabulary, "blocks.*.attention": heads, ...}, how)

A plan is {pattern of names: style}, as torch's parallelize_module takes one for DTensor. A style
is a function (module, how) that returns what stands in the module's place.
"""

import fnmatch
from dataclasses import dataclass
from typing import Any, Callable

from torch import nn

from ranklab.tensor_parallel.attention import enter_before, parallel_attention
from ranklab.tensor_parallel.dropout import own_random_in
from ranklab.tensor_parallel.linear import (
    ColumnParallelLinear, OverlappedColumnLinear, RowParallelLinear,
)
from ranklab.tensor_parallel.regions import (
    identity, copy_to_region, gather_tokens, reduce_from_region, scatter_tokens,
)
from ranklab.tensor_parallel.sequence import SequenceParallelNorm, sequence_parallel_norm
from ranklab.tensor_parallel.vocabulary import (
    VocabParallelEmbedding, VocabParallelHead, vocab_parallel_cross_entropy,
    vocab_parallel_embedding, vocab_parallel_loss,
)


@dataclass(frozen=True)
class TPConfig:
    """What styles need to know. The functions and classes may be a learner's own.

    sequence_parallel  outside of the regions each rank has its tokens
    overlap            weight gradients are computed while gradients of inputs are summed
    dropout_seed       this rank's (see dropout_seeds), for dropout inside of the regions
    """

    group: Any = None
    sequence_parallel: bool = False
    overlap: bool = False
    dropout_seed: int | None = None
    copy: Callable = copy_to_region
    reduce: Callable = reduce_from_region
    column: type = ColumnParallelLinear
    row: type = RowParallelLinear
    attention: Callable = parallel_attention
    embed: Callable = vocab_parallel_embedding
    cross_entropy: Callable = vocab_parallel_cross_entropy
    norm: Callable = sequence_parallel_norm

    def __post_init__(self):
        if self.overlap and self.sequence_parallel:
            raise ValueError("overlap=True sums with an all-reduce, but with sequence_parallel=True"
                             " there is none")

    @property
    def enter(self):
        return gather_tokens if self.sequence_parallel else self.copy

    @property
    def leave(self):
        return scatter_tokens if self.sequence_parallel else self.reduce

    @property
    def outside(self):
        return self.copy if self.sequence_parallel else identity


def tensor_parallel(model, plan, how):
    """`model` with each module that the plan names replaced, in place; tied weights stay tied.

    error  ValueError for a pattern that fits no module
    """
    tied = ties(model)
    for pattern, style in plan.items():
        found = matches(model, pattern)
        if not found:
            raise ValueError(f"no module of the model is called {pattern!r}")
        for name in found:
            parent, _, child = name.rpartition(".")
            holder = model.get_submodule(parent)
            setattr(holder, child, style(holder.get_submodule(child), how))
    for second, first in tied.items():
        parent, _, attribute = second.rpartition(".")
        setattr(model.get_submodule(parent), attribute, model.get_parameter(first))
    return model


def matches(model, pattern):
    return [name for name, _ in model.named_modules() if fnmatch.fnmatchcase(name, pattern)]


def ties(model):
    """{second name: first name} of parameters that stand in several places."""
    first, tied = {}, {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(parameter, name) != name:
            tied[name] = first[parameter]
    return tied


# --- styles ---------------------------------------------------------------------------------------

def column(module, how):
    """Outputs split; its input enters the region by itself."""
    if how.overlap:
        return OverlappedColumnLinear(module, how.group)
    return how.column(module, how.group, how.enter)


def inner_column(module, how):
    """Outputs split; its input is in the region already: see entering."""
    return how.column(module, how.group, identity)


def row(module, how):
    """Inputs split; its output leaves the region."""
    return how.row(module, how.group, how.leave, how.outside)


def entering(module, how):
    """Its input enters the region, once for all layers in it."""
    enter_before(module, how.enter, how.group)
    return module


def heads(module, how):
    """Attention with the children q, k, v and out: each rank has some of its heads."""
    how.attention(module, how.group, how.enter, how.leave)
    if how.dropout_seed is not None:
        own_random_in(module, how.dropout_seed)
    return module


def vocabulary(module, how):
    """An embedding whose rows are split."""
    return VocabParallelEmbedding(module, how.group, how.leave, how.embed)


def logits(module, how):
    """A head whose logits stay split."""
    return VocabParallelHead(module, how.group, how.enter)


def norm(module, how):
    """Computed on all tokens by all ranks; with sequence parallelism each on its own."""
    if not how.sequence_parallel:
        return module
    return SequenceParallelNorm(module, how.group, how.norm)


def dropout(module, how):
    """Where each rank has its tokens, each drops its own numbers."""
    if how.sequence_parallel and how.dropout_seed is not None and module.p > 0:
        own_random_in(module, how.dropout_seed)
    return module


# --- plans ----------------------------------------------------------------------------------------

GPT_PLAN = {
    "token": vocabulary,
    "blocks.*.norm?": norm,
    "blocks.*.attention": heads,
    "blocks.*.mlp.up": column,
    "blocks.*.mlp.down": row,
    "blocks.*.drop": dropout,
    "norm": norm,
    "head": logits,
}


def parallel_gpt(model, how=TPConfig()):
    """models.gpt's GPT, or a part of it, split over the group, with a loss without whole logits.

    A GPT with other layers brings its own plan, as `model.plan`.
    """
    vocab_size = model.config.vocab_size
    plan = getattr(model, "plan", GPT_PLAN)
    plan = {pattern: style for pattern, style in plan.items() if matches(model, pattern)}
    tensor_parallel(model, plan, how)
    model.loss = vocab_parallel_loss(vocab_size, how.group, how.cross_entropy)
    return model
