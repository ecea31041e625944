"""ranklab: every way to train one model on many processes, in files that are read top to bottom.

What is taught, in the order of the labs: at most three files for an idea, read from left to right.
A name without a folder is in the folder of the name before it in its row, or else in ranklab/.
The docstring of each package lists its other files.

    00  a function on many ranks  ranks.py
    01  one device and its costs  baseline/flops.py, memory.py, checkpointing.py
    02  collectives               collectives/verbs.py, ring.py, tree.py
    03  data parallelism, DDP     data_parallel/buckets.py, replica.py; gradients.py: hooks, overlap
    04  compressed gradients      ddp/half.py, top_k.py, low_rank.py
    05  Horovod                   horovod/negotiation.py, fusion.py, optimizer.py
    06  ZeRO 1 and 2, then 3      zero/partition.py, stages.py; stage3.py stands on units.py
    07  FSDP                      fsdp/shards.py, block.py; it stands on zero/units.py, too
    08  tensor parallelism        tensor_parallel/regions.py, linear.py, attention.py
    09  pipelines                 pipeline_parallel/actions.py, schedules.py, executor.py
    10  long contexts             context_parallel/block.py, ring.py, ulysses.py
    11  mixtures of experts       expert_parallel/route.py, dispatch.py, layer.py
    12  all of them on one mesh   mesh.py; hybrid/layout.py, training.py
    13  which layout, how fast    planner/memory.py, step.py, search.py
    14  failures                  formulas/resilience.py; resilience/health.py, resume.py
    15  clusters                  cluster/job.py, sbatch.py, nccl_log.py
    16  programs that misbehave   clinic/case.py, detectors.py, observer.py

What it is built on:

    starting and watching ranks   engine/launcher.py; worker_group.py sees failures, stall.py hangs
    counting bytes, memory, time  meter/traffic.py, curve.py, timeline.py
    the one training loop         trainer/loop.py; parallel.py plugs each technique into it
    checkpoints, for any layout   checkpoint/save.py, load.py; reshard.py copies what overlaps
    formulas for bytes and time   formulas/zero.py, and one file for each technique that has some
    models and data               models/gpt.py, data/text.py; basics/ has the smallest helpers

In peers/ are the production tools, which give the same numbers. The school around all this:
checks/, projects/, plots/, interview/, course/ and cli.py.

The names below are what a lab's first cell needs. They load on first use, so `import ranklab` is
instant and imports neither torch nor matplotlib.
"""

import importlib

from ranklab import moved

__version__ = "2.0.0"  # CHANGELOG.md says how versions are numbered
_HOME_OF = {
    "launch": "ranklab.engine",
    "device": "ranklab.engine",
    "RankError": "ranklab.engine",
    "HangError": "ranklab.engine",
    "check": "ranklab.course.check",
    "hint": "ranklab.course.hint",
    "answer": "ranklab.course.hint",
    "questions": "ranklab.course.questions",
    "begin": "ranklab.course.begin",
    "catch_up": "ranklab.course.begin",
    "status": "ranklab.course.begin",
    "passed_answers": "ranklab.course.passed_answers",
}
__all__ = list(_HOME_OF)


def __getattr__(name):
    if name not in _HOME_OF:
        raise AttributeError(f"module 'ranklab' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


moved.install()


def load_ipython_extension(shell):
    """Register the cell magic for `%load_ext ranklab`.

    A cell that begins with `%%ranks 4` then runs on four fresh ranks.
    """
    from ranklab.magic import register

    register(shell)
