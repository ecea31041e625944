"""Lab 12: what goes wrong when all kinds of parallelism meet on one model."""

from mutants import mutant

from ranklab.hybrid import parallelize

KEEP = "    hybrid.pipeline.keep_stages(model)\n"
SPLIT = "    parallel_gpt(model, TPConfig(hybrid.tensor.group, layout.sequence_parallel))\n"
GIVE = "    hybrid.materialize(model)\n"
CHECKPOINT = ("    if layout.recompute:\n        checkpoint_blocks(model, functools.partial("
              "checkpoint, use_reentrant=False))\n")
STAGES = "    hybrid.pipeline.make_stages(model)\n"
DATA = "    hybrid.data.apply(model)\n"
RETURN = "    return model"


def _wrong(*edits, says, **named):
    return mutant(parallelize, *edits, says=says, **named)


WRONG = [
    _wrong(DATA, "", SPLIT, DATA + SPLIT, says="replaced later is never averaged"),
    _wrong(DATA, "", says=r"hybrid\.data\.apply.* is missing"),
    _wrong(CHECKPOINT, "", says="checkpoint_blocks"),
    _wrong(", layout.sequence_parallel", "", says="each rank has its tokens"),
    _wrong(GIVE, "", SPLIT, GIVE + SPLIT, says="what goes later has had memory"),
    _wrong("hybrid.tensor.group", "None", says=r"in the group hybrid\.tensor\.group"),
    _wrong("layout.sequence_parallel", "layout.recompute", says="each rank has its tokens",
           called="sequence_parallel_where_it_recomputes"),
    _wrong(GIVE, GIVE + DATA, says="in place, once|replaced later", called="data_before_and_after"),
    _wrong(CHECKPOINT, DATA + CHECKPOINT, says="in place, once", called="data_also_earlier"),
    _wrong(RETURN, "    return hybrid.data.replica", says="return the model itself|'replica'"),
    _wrong(STAGES, "", KEEP, STAGES + KEEP, says="keep_stages.* is first"),
    _wrong("hybrid.tensor.group", "hybrid.data.group", says=r"in the group hybrid\.tensor\.group",
           called="the_data_ranks_split_it"),
    _wrong("if layout.recompute:", "if True:", says="and only then", called="always_recomputes"),
    _wrong(", layout.sequence_parallel", ", layout.tp > 1", says="each rank has its tokens",
           called="always_in_sequence"),
    _wrong(SPLIT, "", says="tensor parallelism its part"),
    _wrong(KEEP, "", says="keep_stages.* is first", called="no_layers_are_chosen"),
    _wrong(STAGES, "", says="make_stages.* is missing"),
    _wrong(GIVE, "", says="A model on the meta device"),
    _wrong(GIVE, "", DATA, DATA + GIVE, says="before the data ranks", called="memory_last"),
    _wrong(GIVE, "", KEEP, GIVE + KEEP, says="what goes later has had", called="memory_first"),
    _wrong(STAGES, "", SPLIT, STAGES + SPLIT, says="make_stages|meta device|element",
           called="stages_of_whole_matrices"),
    _wrong(DATA, DATA + DATA, says="in place, once"),
    _wrong(RETURN, "    pass", says="return the model itself", called="returns_nothing"),
]
