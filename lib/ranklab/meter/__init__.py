"""What a step costs: bytes on the wire and bytes in memory, counted exactly.

Read in this order:

    ops.py       one c10d op -> bytes sent and received; the convention for collectives
    traffic.py   Traffic: a block in which every op of this rank is counted
    memory.py    memory_of: parameters, gradients, optimizer state, buffers
    saved.py     SavedActivations: what autograd keeps for backward
"""

from ranklab.meter.memory import Memory, memory_of
from ranklab.meter.costs import Op
from ranklab.meter.saved import SavedActivations
from ranklab.meter.traffic import Traffic

__all__ = ["Op", "Traffic", "Memory", "memory_of", "SavedActivations"]
