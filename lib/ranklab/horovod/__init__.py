"""Horovod's API on torch.distributed: `import ranklab.horovod as hvd` for `horovod.torch`.

Read in this order:

    ops.py            allreduce, allgather, broadcast, ...: what a script calls
    optimizer.py      asks for averages in backward, and waits for them in step()
    parameters.py     the same start on every rank
    background.py     the thread that negotiates and communicates while the others compute
    negotiation.py    which tensors do all ranks have? in its smallest form
    coordinator.py    the same, whole: mismatches, stalls
    execute.py        what was agreed on becomes collectives
    fusion.py         many small tensors, one all-reduce
    adaptive_sum.py   adasum: add what differs, average what agrees
    compression.py    gradients in 16 bits
    trace.py          timeline: what happened to each tensor, as a trace
    cost.py           what negotiation and fusion cost, before it is run
    tuner.py          tune_fusion: which threshold is the fastest?
    landscapes.py     models and networks, on which it is tried

and, below them, start.py (init, shutdown), world.py (rank, size), requests.py (what travels between
the ranks) and settings.py. Lab 05 builds the ideas in it. It is made of collectives (sendrecv, and
the model of time). Not here: the old argument average=, step(closure), the response cache, join,
process sets, alltoall, reducescatter, sparse tensors, elastic runs, tuning while a model trains.
"""

from ranklab.horovod.adaptive_sum import adasum, adasum_of_two, dot_products, gather_halves
from ranklab.horovod.compression import Compression, compress_fp16
from ranklab.horovod.fusion import fuse_tensors
from ranklab.horovod.negotiation import negotiate
from ranklab.horovod.ops import (
    allgather, allreduce, allreduce_, allreduce_async, allreduce_async_, barrier, broadcast,
    broadcast_, broadcast_async_, grouped_allreduce, poll, synchronize,
)
from ranklab.horovod.optimizer import DistributedOptimizer, distributed_optimizer
from ranklab.horovod.parameters import (
    broadcast_object, broadcast_optimizer_state, broadcast_parameters,
)
from ranklab.horovod.requests import (
    Adasum, Average, HorovodInternalError, Max, Min, Mismatch, Product, Sum,
)
from ranklab.horovod.start import init, shutdown
from ranklab.horovod.trace import timeline
from ranklab.horovod.tuner import tune_fusion
from ranklab.horovod.world import (
    counted, cross_size, is_initialized, local_rank, local_size, rank, size, start_timeline,
    stop_timeline,
)

__all__ = [
    "Adasum", "Average", "Compression", "DistributedOptimizer",
    "HorovodInternalError", "Max", "Min", "Mismatch", "Product", "Sum", "adasum", "adasum_of_two",
    "allgather", "allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "barrier",
    "broadcast", "broadcast_", "broadcast_async_", "broadcast_object", "broadcast_optimizer_state",
    "broadcast_parameters", "compress_fp16", "counted", "cross_size", "distributed_optimizer",
    "dot_products", "fuse_tensors", "gather_halves", "grouped_allreduce", "init", "is_initialized",
    "local_rank", "local_size", "negotiate", "poll", "rank", "shutdown", "size", "start_timeline",
    "stop_timeline", "synchronize", "timeline", "tune_fusion",
]
