"""The one training loop, and the interface through which every kind of parallelism plugs into it.

Read in this order:

    loop.py         Trainer: fit, step, log, save; the same code for one process and for many
    parallel.py     Parallel: what the loop asks of the ranks; by default there is one process
    text.py         TextTrainer: trains a GPT on text
    stop_signal.py  StopSignal: a SIGTERM ends the run after the same step on every rank

Each technique overrides Parallel in its own training.py; parallel.py has the table. The loop for
images is in projects/ddp, the one project that needs it.
"""

from ranklab.trainer.loop import (
    PRECISIONS, History, LoopConfig, Schedule, Trainer, decay_groups, due, learning_rate,
)
from ranklab.trainer.parallel import GroupParallel, Parallel, Piece, flat_pieces, groups_here
from ranklab.trainer.text import TextTrainer, TrainConfig, text_for

__all__ = [
    "GroupParallel", "History", "LoopConfig", "PRECISIONS", "Parallel", "Piece", "Schedule",
    "TextTrainer", "TrainConfig", "Trainer", "decay_groups", "due", "flat_pieces", "groups_here",
    "learning_rate", "text_for",
]
