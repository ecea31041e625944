"""Horovod's API on torch.distributed: `import ranklab.horovod as hvd` for `horovod.torch`.

Read negotiation.py, fusion.py and optimizer.py: which tensors all ranks have, which of them travel
together, and what step() waits for. Around them:

    ops.py            allreduce, allgather, broadcast, ...: what a script calls
    background.py     the thread that negotiates and communicates during computation
    world.py          init, shutdown, rank, size
    parameters.py     the same start on every rank
    compression.py    gradients in 16 bits
    adaptive_sum.py   adasum: add what differs, average what agrees
    trace.py          timeline: what happened to each tensor, as a trace
    cost.py           the cost of negotiation and fusion, predicted; tune_fusion
    training.py       HorovodParallel, for the training loop

Lab 05 builds its ideas. It uses sendrecv and the time model of collectives. Left out are the old
argument average=, step(closure), the response cache, join, process sets, alltoall, reducescatter,
sparse tensors, grouped calls that return a handle, SyncBatchNorm, the timeline's mark_cycles,
elastic runs, tuning while a model trains, and queries about the build (mpi_enabled, nccl_built,
...).
"""

from ranklab.horovod.adaptive_sum import adasum, adasum_of_two, dot_products, gather_halves
from ranklab.horovod.compression import Compression, compress_fp16
from ranklab.horovod.cost import NoisySteps, Workload, overlapped_time, tune_fusion
from ranklab.horovod.fusion import fuse_tensors
from ranklab.horovod.negotiation import (
    Adasum, Average, HorovodInternalError, Max, Min, Mismatch, Product, Sum, negotiate,
)
from ranklab.horovod.ops import (
    allgather, allgather_async, allreduce, allreduce_, allreduce_async, allreduce_async_, barrier,
    broadcast, broadcast_, broadcast_async, broadcast_async_, grouped_allgather, grouped_allreduce,
    grouped_allreduce_, poll, synchronize,
)
from ranklab.horovod.optimizer import DistributedOptimizer, distributed_optimizer
from ranklab.horovod.parameters import (
    allgather_object, broadcast_object, broadcast_optimizer_state, broadcast_parameters,
)
from ranklab.horovod.trace import all_reduces, one_step, read_timeline, timeline
from ranklab.horovod.world import (
    counted, cross_rank, cross_size, init, is_initialized, local_rank, local_size, rank, shutdown,
    size, start_timeline, stop_timeline,
)

__all__ = [
    "Adasum", "Average", "Compression", "DistributedOptimizer", "HorovodInternalError", "Max",
    "Min", "Mismatch", "NoisySteps", "Product", "Sum", "Workload", "adasum", "adasum_of_two",
    "all_reduces", "allgather", "allgather_async", "allgather_object", "allreduce", "allreduce_",
    "allreduce_async", "allreduce_async_", "barrier", "broadcast", "broadcast_", "broadcast_async",
    "broadcast_async_", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters",
    "compress_fp16", "counted", "cross_rank", "cross_size", "distributed_optimizer", "dot_products",
    "fuse_tensors", "gather_halves", "grouped_allgather", "grouped_allreduce", "grouped_allreduce_",
    "init", "is_initialized", "local_rank", "local_size", "negotiate", "one_step",
    "overlapped_time", "poll", "rank", "read_timeline", "shutdown", "size", "start_timeline",
    "stop_timeline", "synchronize", "timeline", "tune_fusion",
]
