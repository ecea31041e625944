"""The checks of zero_memory and zero_traffic: the paper's numbers, and those of float32 with Adam.

Section 7 of the lab shows that a real step holds and sends as much as the learner's formulas say.
"""

import math
from typing import NamedTuple

from ranklab.checks.prover import Must, Proof, Slip, Stage
from ranklab.engine.report import count_ranks
from ranklab.formulas.zero import States
from ranklab.zero import zero_memory, zero_traffic

STAGES = (0, 1, 2, 3)
REFUSED = "a stage other than 0 to 3 is refused with a ValueError"
SAY = "Say what is wrong: raise ValueError(...)."
CHECKED = "if stage not in range(4)"
REFUSE = Slip("Keep the check of `stage`, which raises a ValueError.", (CHECKED, "if False"),
              (CHECKED, "if stage > 3"), (CHECKED, "if stage < 0"))


class Memory(NamedTuple):
    """A model, and the bytes per number where they are not the default."""

    stage: int
    parameters: float
    ranks: int
    nbytes: tuple = ()

    def __str__(self):
        each = " + ".join(map(str, self.nbytes or (2, 2, 12)))
        return (f"stage {self.stage}, {self.parameters:,.10g} parameters on "
                f"{count_ranks(self.ranks)}, {each} bytes for each")


MODELS = (7.5e9, 64), (138, 3, (4, 4, 8)), (138, 1, (4, 4, 8)), (9, 4, (3, 5, 7)), (10, 4)


def _see_states(fn, case):
    states = fn(case.stage, case.parameters, case.ranks, *case.nbytes)
    names = [name for name in States._fields if hasattr(states, name)]
    yield {"the list of its names": Must(names, [*States._fields])} | {
        f"{name}, in bytes,": getattr(states, name, None) for name in States._fields}


def states_of_a_rank(stage, parameters, ranks, parameter_bytes=2, gradient_bytes=2,
                     optimizer_bytes=12):
    """Deal the numbers out to the ranks as evenly as possible."""
    each, rest = divmod(parameters, ranks)
    fullest = each + (rest > 0)
    parts = {0: (parameters,) * 3, 1: (parameters, parameters, fullest),
             2: (parameters, fullest, fullest), 3: (fullest,) * 3}[stage] if stage in STAGES else ()
    if not parts:
        raise ValueError(stage)
    return States(*(n * width for n, width in zip(
        parts, (parameter_bytes, gradient_bytes, optimizer_bytes))))


def rounds_bytes(stage, parameters, ranks, parameter_bytes=2, gradient_bytes=2, optimizer_bytes=12):
    each = (3, parameter_bytes), (2, gradient_bytes), (1, optimizer_bytes)
    return States(*(math.ceil(n * parameters / ranks) if stage >= first else n * parameters
                    for first, n in each))


SHARD, RETURN = "math.ceil(parameters / ranks)", "return States("
WHOLE = "{} keeps the {} whole on each rank; stage {} is the first to shard."
CUT = "From stage {} on, each rank holds 1/R of the {}."
WIDTH = "Each kind has its own number of bytes: parameter_bytes, gradient_bytes, optimizer_bytes."
MEMORY = Proof(
    zero_memory,
    Stage({"7.5 billion parameters on 64 GPUs: 120, 31.4, 16.6 and 1.9 GB, as in the paper": (),
           "float32 with Adam: 16 bytes for each number; on 1 rank the same in every stage": (),
           "where R does not divide: the fullest rank": ()},
          _see_states, tuple(Memory(stage, *model) for model in MODELS for stage in STAGES),
          oracle=states_of_a_rank),
    Stage(REFUSED, _see_states, (Memory(4, 12, 2), Memory(-1, 12, 2)), oracle=states_of_a_rank,
          note=SAY),
    mistakes=(
        Slip("A number can't be split: round up, since the fullest rank has ceil(parameters / R) "
             "numbers.",
             (SHARD, "parameters // ranks"), (SHARD, "math.floor(parameters / ranks + 0.5)"),
             (SHARD, "parameters / ranks"), (SHARD, "round(parameters / ranks)")),
        Slip("If R divides the number of parameters, ceil(parameters / R) is exactly parameters / "
             "R.",
             (SHARD, "parameters // ranks + 1")),
        Slip("A shard is 1/R: divide by the number of ranks.", (SHARD, "parameters")),
        Slip("Round up the count of numbers, then multiply by the bytes of each: a number is never "
             "split.",
             rounds_bytes),
        Slip(WHOLE.format("Stage 0", "optimizer state", 1), ("stage >= 1", "True")),
        Slip(CUT.format(1, "optimizer state"), ("stage >= 1", "stage >= 2"),
             ("stage >= 1", "stage >= 3"), ("stage >= 1", "stage == 1")),
        Slip(WHOLE.format("Stage 1", "gradients", 2), ("stage >= 2", "stage >= 1")),
        Slip(CUT.format(2, "gradients"), ("stage >= 2", "stage >= 3"),
             ("stage >= 2", "stage == 2")),
        Slip(WHOLE.format("Stage 2", "parameters", 3), ("stage >= 3", "stage >= 2")),
        Slip(CUT.format(3, "parameters"), ("stage >= 3", "False")),
        Slip("The optimizer state is sharded first, because it is the largest; the parameters come "
             "last.", ("parameter_bytes * (shard if stage >= 3",
                       "parameter_bytes * (shard if stage >= 1",
                       "optimizer_bytes * (shard if stage >= 1",
                       "optimizer_bytes * (shard if stage >= 3")),
        Slip("The default is mixed precision: each parameter and each gradient has 2 bytes, not "
             "float32's 4.", ("parameter_bytes=2", "parameter_bytes=4"),
             ("gradient_bytes=2", "gradient_bytes=4"),
             ("parameter_bytes=2, gradient_bytes=2", "parameter_bytes=4, gradient_bytes=4")),
        Slip("Adam has two moments, and mixed precision also keeps float32 master weights: 12 "
             "bytes.", ("optimizer_bytes=12", "optimizer_bytes=8")),
        Slip("The master weights and both of Adam's moments are in float32: 3 x 4 bytes.",
             ("optimizer_bytes=12", "optimizer_bytes=6")),
        Slip(WIDTH, ("gradient_bytes * (shard", "parameter_bytes * (shard"),
             ("parameter_bytes * (shard", "gradient_bytes * (shard"),
             ("optimizer_bytes * (shard", "gradient_bytes * (shard")),
        Slip("Return bytes: multiply each count of numbers by the bytes per number.",
             ("parameter_bytes * (", "("), ("gradient_bytes * (", "("),
             ("optimizer_bytes * (", "(")),
        Slip("Return States(parameters, gradients, optimizer_state).",
             (RETURN, "return sum((", "stage >= 1 else parameters))",
              "stage >= 1 else parameters)))")),
        Slip("The order of States is parameters, gradients, optimizer_state.",
             (RETURN, "return (lambda a, b, c: States(c, b, a))("),
             (RETURN, "return (lambda a, b, c: States(a, c, b))(")),
        REFUSE,
    ), hints=(
        "Which of parameters, gradients and optimizer state does each stage shard?",
        "Optimizer state is sharded from stage 1 on, gradients from stage 2 on, parameters at "
        "stage 3. Of each sharded kind, the fullest rank holds ceil(parameters / ranks) numbers.",
        "shard = math.ceil(parameters / ranks); States(parameter_bytes * (shard if stage >= 3 else "
        "parameters), ...)",
    ))


# --- zero_traffic ---------------------------------------------------------------------------------

class Bytes(NamedTuple):
    """A step on a number of bytes of parameters, some of them resident."""

    stage: int
    nbytes: float
    ranks: int
    resident: float

    def __str__(self):
        return (f"stage {self.stage}, {self.nbytes:,.10g} bytes on {count_ranks(self.ranks)}, "
                f"{self.resident} resident")


STEPS = (6.4e9, 64, 0), (552, 3, 48), (552, 1, 48), (1000, 2, 1000), (1000, 3, 0)


def _see_sent(fn, case):
    stage, nbytes, ranks, resident = case
    yield {"the number of bytes that a rank sends": fn(stage, nbytes, ranks, resident)
           if resident else fn(stage, nbytes, ranks)}


def sent_in_rings(stage, nbytes, ranks, resident_bytes=0):
    """Send 1/R of the bytes to the next rank, R-1 times in each collective."""
    collectives = {0: 2, 1: 2, 2: 2, 3: 3}
    if stage not in collectives:
        raise ValueError(stage)
    again = nbytes - resident_bytes
    messages = [n / ranks for n in [nbytes, nbytes, again][:collectives[stage]]]
    return sum(message for message in messages for _ in range(ranks - 1))


SHARE, STAGE_3 = "(ranks - 1) / ranks", "share * (3 * nbytes - resident_bytes)"
HAS_OWN = "A rank already has its own 1/R: it sends (R-1)/R of the bytes."
TRAFFIC = Proof(
    zero_traffic,
    Stage({"on 64 ranks, with nothing resident: 1x, 1x, 1x and 1.5x an all-reduce": (),
           "what is resident in stage 3 is gathered once a step, on 3 ranks": (),
           "one rank sends nothing": ()},
          _see_sent, tuple(Bytes(stage, *step) for step in STEPS for stage in STAGES),
          oracle=sent_in_rings),
    Stage(REFUSED, _see_sent, (Bytes(4, 12, 2, 0), Bytes(-1, 12, 2, 0)), oracle=sent_in_rings,
          note=SAY),
    mistakes=(
        Slip(HAS_OWN, (SHARE, "1")),
        Slip("That is the total over all ranks; each of them sends 1/R of it.",
             (SHARE, "ranks - 1")),
        Slip("1/R is what a rank has already. It sends the rest, (R-1)/R.", (SHARE, "1 / ranks")),
        Slip("That is the reduce-scatter alone. An all-gather of the updated parameters follows.",
             ("return 2 * share", "return share")),
        Slip("Stage 0 sends as much as stages 1 and 2: an all-reduce consists of the two "
             "collectives they make.",
             ("return 2 * share", "return (2 if stage else 1) * share"),
             ("if stage < 3:", "if stage == 0:\n        return share * nbytes\n    if stage < 3:")),
        Slip("An all-reduce sends 2 (R-1)/R of the bytes, and stages 0 to 2 send no more than "
             "that.",
             ("2 * share", "4 * share")),
        Slip("Stage 3 sends more than an all-reduce: parameters travel twice, for forward and for "
             "backward, and gradients once.", ("stage < 3", "stage < 4")),
        Slip("Only stage 3 gathers the parameters again for backward.",
             ("stage < 3", "stage < 2"), ("stage < 3", "stage < 1")),
        Slip("Resident parameters are gathered once per step, not twice.",
             ("(3 * nbytes - resident_bytes)", "3 * nbytes")),
        Slip("Resident parameters are still gathered once per step: subtract resident_bytes once, "
             "not twice.",
             ("3 * nbytes - resident_bytes", "3 * nbytes - 2 * resident_bytes")),
        Slip("The gradients of resident parameters are reduced like all others: subtract "
             "resident_bytes only once.",
             ("3 * nbytes - resident_bytes", "3 * (nbytes - resident_bytes)")),
        Slip("Resident parameters skip their second gather: subtract resident_bytes, don't add "
             "them.",
             ("nbytes - resident_bytes", "nbytes + resident_bytes")),
        Slip("A rank would have sent only (R-1)/R of the resident bytes: subtract them before you "
             "multiply.", (STAGE_3, "share * 3 * nbytes - resident_bytes")),
        Slip("Only stage 3 gathers twice: the other stages have no second gather to save.",
             ("return 2 * share * nbytes", "return share * (2 * nbytes - resident_bytes)")),
        Slip("Stage 3 sends 1.5 times as much as an all-reduce, which sends 2 (R-1)/R of the "
             "bytes.",
             ("(3 * nbytes - resident_bytes)", "1.5 * nbytes"),
             ("(3 * nbytes - resident_bytes)", "(1.5 * nbytes - resident_bytes)")),
        Slip("1.5 times an all-reduce is three collectives, and each sends (R-1)/R of the bytes.",
             ("3 * nbytes", "4 * nbytes")),
        Slip("Don't round: the formula can give fractions of a byte.",
             ("return 2 * share * nbytes", "return int(2 * share * nbytes)"),
             ("return 2 * share * nbytes", "return round(2 * share * nbytes)"),
             ("return 2 * share * nbytes", "return 2 * (ranks - 1) * (nbytes // ranks)")),
        REFUSE,
    ), hints=(
        "An all-reduce is a reduce-scatter and an all-gather. Which of them does each stage make?",
        "Each of them sends (R-1)/R of the bytes. Stages 0 to 2 make one of each. Stage 3 gathers "
        "parameters twice, but resident ones only once.",
        "share = (ranks - 1) / ranks; share * (3 * nbytes - resident_bytes) for stage 3",
    ))
