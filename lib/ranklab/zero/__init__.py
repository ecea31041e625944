"""ZeRO: ranks shard the states that data parallelism holds R times, and gather them for use.

What one of 4 ranks keeps from step to step, # of the parameters P, gradients G and the optimizer's
state O (with Adam in mixed precision O is six times as large as P):

                      P                    G                    O
    data parallelism  [################]   [################]   [################]
    stage 1           [################]   [################]   [####            ]
    stage 2           [################]   [####            ]   [####            ]
    stage 3           [####            ]   [####            ]   [####            ]

The three phases of a step, and what is sent in each. Data parallelism all-reduces G after backward;
an all-reduce is a reduce-scatter and an all-gather, and ZeRO steps between the two:

                      1. forward, backward   2. optimizer      3. afterwards
    stage 1           reduce-scatter G       step the shard    all-gather P
    stage 2           reduce-scatter G *     step the shard    all-gather P
    stage 3           all-gather P, twice;   step the shard    nothing: the next forward gathers
                      reduce-scatter G *

    * bucket by bucket (unit by unit): the rest of each is freed as soon as it is reduced

Each collective sends (R-1)/R of the bytes: stages 1 and 2 as much as the all-reduce, stage 3 half
as much again.

Stages 1 and 2 are two files: which rank owns what, and when it is sent.

    partition.py      partition_flat, ShardedBucket, an optimizer over the shards of a rank
    stages.py         ZeroStage1, ZeroStage2: optimizer state, then gradients, in shards

Stage 3 is four:

    units.py          the engine, FSDP's as well: units, their order, gather, free, reduce, prefetch
    inference.py      ZeroInference: only the forward of stage 3
    stage3.py         ZeroStage3: when a unit is gathered, freed and reduced
    sharded_model.py  how parameters are sent: in flat shards

The rest:

    keeping.py     units_to_keep: the best use of memory in a step of stage 3, by a model
    muon.py        sharded_muon_step: an optimizer that needs whole matrices
    offload.py     the optimizer's state in the CPU's memory, or in a file
    config.py      deepspeed_config: the fastest strategy that fits, in DeepSpeed's format
    training.py    Zero: the training loop's view

formulas/zero.py has zero_memory and zero_traffic: what a stage holds and sends. formulas/muon.py
has muon_cost.

DeepSpeed has all of this as configuration; the tests compare the two (peers/deepspeed_zero).
"""

from ranklab.formulas.muon import MuonCost, muon_cost, muon_owners, newton_schulz_flops
from ranklab.formulas.zero import States, zero_memory, zero_traffic
from ranklab.zero.config import deepspeed_config, fastest_way
from ranklab.zero.inference import ZeroInference
from ranklab.zero.keeping import Step, last_that_fit, published_steps, units_to_keep
from ranklab.zero.muon import exchange_matrices, newton_schulz, sharded_muon_step
from ranklab.zero.offload import CpuMemory, Files, offload_optimizer
from ranklab.zero.partition import ShardedBucket, ShardedOptimizerMixin, partition_flat
from ranklab.zero.sharded_model import ShardedModel
from ranklab.zero.stage3 import ZeroStage3
from ranklab.zero.stages import ZeroStage1, ZeroStage2
from ranklab.zero.units import call_after_backward, in_backward

__all__ = [
    "CpuMemory", "Files", "MuonCost", "ShardedBucket", "ShardedModel", "ShardedOptimizerMixin",
    "States", "Step", "ZeroInference", "ZeroStage1", "ZeroStage2", "ZeroStage3",
    "call_after_backward", "deepspeed_config", "exchange_matrices", "fastest_way", "in_backward",
    "last_that_fit", "muon_cost", "muon_owners", "newton_schulz", "newton_schulz_flops",
    "offload_optimizer", "partition_flat", "published_steps", "sharded_muon_step",
    "units_to_keep", "zero_memory", "zero_traffic",
]
