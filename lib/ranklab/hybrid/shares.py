"""The part of a model on each rank of a layout, by formulas."""

import functools
from typing import NamedTuple

from ranklab.expert_parallel.layer import MoEConfig
from ranklab.hybrid.layout import Layout
from ranklab.pipeline_parallel.actions import places
from ranklab.pipeline_parallel.stages import gpt_costs, split_stages
from ranklab.ranks import shard_range


class Share(NamedTuple):
    """The part of the model on one pipeline rank."""

    stages: dict  # number of a stage -> blocks in it
    embedding: bool
    head: bool
    messages: int  # sent for each micro-batch, forward and backward together

    @property
    def blocks(self):
        return sum(self.stages.values())


def shares(config, layout):
    """Return the Share of each pipeline rank."""
    return _shares(config, layout.pp, layout.virtual, layout.schedule)


@functools.lru_cache(maxsize=256)  # a search needs the same pipeline again and again
def _shares(config, pp, virtual, schedule):
    place = places(actions_of(pp, virtual, schedule, 2 * pp))
    layers, last, rank_shares = _split(config, len(place)), max(place), []
    for rank in range(pp):
        stages = [stage for stage in place if place[stage] == rank]
        blocks = {stage: len(layers[stage]) - (stage == 0) - (stage == last) for stage in stages}
        messages = [place.get(stage + step, rank) != rank for stage in stages for step in (1, -1)]
        rank_shares.append(Share(blocks, 0 in stages, last in stages, sum(messages)))
    return rank_shares


@functools.lru_cache(maxsize=64)
def _split(config, stages):
    return split_stages(gpt_costs(config), stages)


@functools.lru_cache(maxsize=256)
def actions_of(pp, virtual, schedule, pieces):
    """Return the actions of each rank of a pipeline with `pieces` micro-batches."""
    return Layout(pp=pp, virtual=virtual, schedule=schedule).new_schedule()(pp, pieces)


def vocabulary_rows(config, layout):
    """Return the rows of the embedding on the first tensor rank."""
    return len(shard_range(config.vocab_size, 0, layout.tp))


def hidden_bytes(job, layout):
    """Return the bytes of a micro-batch's hidden states between two layers on a rank: float32."""
    return 4 * job.tokens * job.config.n_embd // (layout.tp if layout.sequence_parallel else 1)


def parameters_of(config, layout, share):
    """Return (parameters in a block, parameters outside blocks) of a rank with this Share."""
    C = config.n_embd
    matrix = vocabulary_rows(config, layout) * C * (share.embedding or share.head)
    block = 4 * C * C // layout.tp + 2 * C + sum(mlp_numbers(config, layout))
    return block, matrix + C * share.head


def mlp_numbers(config, layout):
    """Return (a rank's parameters in a block's MLP without experts, and in its experts)."""
    C = config.n_embd
    if not isinstance(config, MoEConfig):
        return 8 * C * C // layout.tp, 0
    common = config.n_expert * C + 2 * C * config.shared_width // layout.tp
    return common, 2 * config.n_expert * C * config.expert_width // (layout.ep * layout.tp)
