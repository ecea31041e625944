"""Lab 12: what goes wrong when all kinds of parallelism meet on one model."""

from mutants import mutant

from ranklab.hybrid import parallelize

KEEP = "    hybrid.pipeline.keep_mine(model)\n"
SPLIT = "    parallel_gpt(model, How(hybrid.tensor.group, layout.sequence_parallel))\n"
GIVE = "    hybrid.give_memory(model)\n"
CHECKPOINT = ("    if layout.recompute:\n        checkpoint_blocks(model, functools.partial("
              "checkpoint, use_reentrant=False))\n")
STAGES = "    hybrid.pipeline.make_stages(model)\n"
DATA = "    hybrid.data.apply(model)\n"
RETURN = "    return model"


def _wrong(*edits, says, **named):
    return mutant(parallelize, *edits, says=says, **named)


WRONG = [
    _wrong(DATA, "", SPLIT, DATA + SPLIT, says="x", called="data_before_tensor"),
    _wrong(DATA, "", GIVE, GIVE + DATA, says="x", called="data_before_stages"),
    _wrong(DATA, "", KEEP, DATA + KEEP, says="x", called="data_first"),
    _wrong(DATA, "", says="x", called="no_data"),
    _wrong(DATA, DATA*2, says="x", called="data_twice"),
    _wrong(KEEP, "", says="x", called="no_keep"),
    _wrong(SPLIT, "", says="x", called="no_split"),
    _wrong(GIVE, "", says="x", called="no_give"),
    _wrong(CHECKPOINT, "", says="x", called="no_recompute"),
    _wrong("if layout.recompute:", "if True:", says="x", called="always_recompute"),
    _wrong(STAGES, "", says="x", called="no_stages"),
    _wrong(", layout.sequence_parallel", "", says="x", called="no_sp"),
    _wrong(", layout.sequence_parallel", ", layout.tp > 1", says="x", called="always_sp"),
    _wrong("hybrid.tensor.group", "None", says="x", called="no_group"),
    _wrong("hybrid.tensor.group", "hybrid.data.group", says="x", called="data_group"),
    _wrong(GIVE, "", SPLIT, GIVE + SPLIT, says="x", called="give_before_split"),
    _wrong(GIVE, "", KEEP, GIVE + KEEP, says="x", called="give_first"),
    _wrong(GIVE, "", STAGES, STAGES + GIVE, says="x", called="give_after_stages"),
    _wrong(GIVE, "", DATA, DATA + GIVE, says="x", called="give_last"),
    _wrong(KEEP, "", SPLIT, SPLIT + KEEP, says="x", called="keep_after_split"),
    _wrong(KEEP, "", GIVE, GIVE + KEEP, says="x", called="keep_after_give"),
    _wrong(STAGES, "", SPLIT, STAGES + SPLIT, says="x", called="stages_before_split"),
    _wrong(STAGES, "", GIVE, STAGES + GIVE, says="x", called="stages_before_give"),
    _wrong(CHECKPOINT, "", SPLIT, CHECKPOINT + SPLIT, says="x", called="checkpoint_before_split"),
    _wrong(CHECKPOINT, "", STAGES, STAGES + CHECKPOINT, says="x", called="checkpoint_after_stages"),
    _wrong(CHECKPOINT, "", DATA, DATA + CHECKPOINT, says="x", called="checkpoint_last"),
    _wrong(STAGES, "", DATA, DATA + STAGES, says="x", called="stages_last"),
    _wrong(RETURN, "    return hybrid.data", says="x", called="returns_data"),
    _wrong(RETURN, "    pass", says="x", called="returns_none"),
    _wrong(KEEP, "", STAGES, "", DATA, "    hybrid.pipeline.apply(model)\n" + DATA, says="x", called="pipeline_apply"),
    _wrong("use_reentrant=False", "use_reentrant=True", says="x", called="reentrant"),
]
