"""Split a model over the ranks of a group from outside: which modules are split, and how.

    tensor_parallel(model, {"token": vocabulary, "blocks.*.attention": heads, ...}, config)

A plan is {pattern of names: style}, like the plan of torch's parallelize_module for DTensor. A
style is a function (module, config) that returns the module's replacement.
"""

import fnmatch
from dataclasses import dataclass
from typing import Any, Callable


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
    """Options for styles. The functions and classes may be a learner's own.

    sequence_parallel: outside the regions each rank has only its tokens.
    overlap: compute weight gradients while the gradients of inputs are summed.
    dropout_seed: this rank's seed for dropout inside the regions (see dropout_seeds).
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


def tensor_parallel(model, plan, config):
    """Replace each module that the plan names, in place; tied weights stay tied.

    Raises: ValueError for a pattern that matches no module.
    """
    second_names = ties(model)
    for pattern, style in plan.items():
        names = matches(model, pattern)
        if not names:
            raise ValueError(f"no module of the model is called {pattern!r}")
        for name in names:
            parent, _, child = name.rpartition(".")
            holder = model.get_submodule(parent)
            setattr(holder, child, style(holder.get_submodule(child), config))
    for second, first in second_names.items():
        parent, _, attribute = second.rpartition(".")
        setattr(model.get_submodule(parent), attribute, model.get_parameter(first))
    return model


def matches(model, pattern):
    return [name for name, _ in model.named_modules() if fnmatch.fnmatchcase(name, pattern)]


def ties(model):
    """Return {second name: first name} of parameters with several names."""
    first_names, second_names = {}, {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first_names.setdefault(parameter, name) != name:
            second_names[name] = first_names[parameter]
    return second_names


# --- styles ---------------------------------------------------------------------------------------

def column(module, config):
    """Split the outputs; this layer makes its input enter the region."""
    if config.overlap:
        return OverlappedColumnLinear(module, config.group)
    return config.column(module, config.group, config.enter)


def inner_column(module, config):
    """Split the outputs; the input is in the region already: see entering."""
    return config.column(module, config.group, identity)


def row(module, config):
    """Split the inputs; the output leaves the region."""
    return config.row(module, config.group, config.leave, config.outside)


def entering(module, config):
    """Make the input enter the region, once for all layers in the module."""
    enter_before(module, config.enter, config.group)
    return module


def heads(module, config):
    """Split an attention with the children q, k, v and out: some heads on each rank."""
    config.attention(module, config.group, config.enter, config.leave)
    if config.dropout_seed is not None:
        own_random_in(module, config.dropout_seed)
    return module


def vocabulary(module, config):
    """Split the rows of an embedding."""
    return VocabParallelEmbedding(module, config.group, config.leave, config.embed)


def logits(module, config):
    """Split a head, and leave its logits split."""
    return VocabParallelHead(module, config.group, config.enter)


def norm(module, config):
    """Normalize all tokens on all ranks, or with sequence parallelism only each rank's tokens."""
    if not config.sequence_parallel:
        return module
    return SequenceParallelNorm(module, config.group, config.norm)


def dropout(module, config):
    """Drop different numbers on each rank if each has its own tokens (sequence parallelism)."""
    if config.sequence_parallel and config.dropout_seed is not None and module.p > 0:
        own_random_in(module, config.dropout_seed)
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


def parallel_gpt(model, config=TPConfig()):
    """Split models.gpt's GPT, or a part of it, over the group; its loss needs no whole logits.

    A GPT with different layers has its own plan, in `model.plan`.
    """
    vocab_size = model.config.vocab_size
    plan = getattr(model, "plan", GPT_PLAN)
    plan = {pattern: style for pattern, style in plan.items() if matches(model, pattern)}
    tensor_parallel(model, plan, config)
    model.loss = vocab_parallel_loss(vocab_size, config.group, config.cross_entropy)
    return model
