"""Measure what a step costs: exact bytes sent and held in memory, and where its time goes.

Read in this order:

    ops.py       one c10d op -> bytes sent and received; the convention for collectives
    traffic.py   Traffic: a block in which every op of this rank is counted
    memory.py    memory_of: parameters, gradients, optimizer state, buffers, gathered parameters
    curve.py     MemoryCurve: all live bytes after every op of a step, and their peak; MemoryPeak
    saved.py     SavedActivations: what autograd keeps for backward
    timeline.py  Timeline: what a rank did when, from torch's profiler
    perfetto.py  merged_trace: the traces of all ranks in one file
    dry_run.py   one process poses as rank 0 of many, with tensors that take no memory
"""

from ranklab.meter.costs import Op
from ranklab.meter.curve import MemoryCurve, MemoryPeak
from ranklab.meter.dry_run import posing, without_memory
from ranklab.meter.memory import Memory, memory_of
from ranklab.meter.perfetto import merged_trace
from ranklab.meter.saved import SavedActivations
from ranklab.meter.timeline import Event, Timeline, events_of, loading, mark
from ranklab.meter.traffic import Traffic

__all__ = ["Event", "Memory", "MemoryCurve", "MemoryPeak", "Op", "SavedActivations", "Timeline",
           "Traffic", "events_of", "loading", "mark", "memory_of", "merged_trace", "posing",
           "without_memory"]
