"""ZeRO: what data parallelism holds R times, each rank holds once, and gathers when it is used.

    partition.py   partition_flat: who owns what
    owned.py       an optimizer over what one rank owns
    stages.py      ZeroStage1, ZeroStage2: optimizer state, then gradients, in shards
    units.py       what stage 3 gathers at once
    stage3.py      ZeroStage3: parameters in shards, too
"""

from ranklab.zero.partition import partition_flat
from ranklab.zero.stage3 import ZeroStage3
from ranklab.zero.stages import ZeroStage1, ZeroStage2

__all__ = ["ZeroStage1", "ZeroStage2", "ZeroStage3", "partition_flat"]
