"""The checks of zero_memory and zero_traffic: the paper's numbers, and those of float32 with Adam.

That a real step holds and sends as much, section 7 of the lab shows by the learner's own formulas.
"""

from ranklab.checks.beside import expect
from ranklab.checks.trial import explain, refuses
from ranklab.engine.report import count_ranks

FROM = {"parameters": 3, "gradients": 2, "optimizer_state": 1}  # the first stage that shards them
NO_STAGE = {f"stage={stage}": (stage, 12, 2) for stage in (4, -1)}
SAY = "Say what is wrong: raise ValueError(...)."
# What is shown; then parameters, ranks, and the bytes of each number where they are not the default
MEMORY = (
    ("7.5 billion parameters on 64 GPUs: 120, 31.4, 16.6 and 1.9 GB, as in the paper",
     (7.5e9, 64)),
    ("float32 with Adam: 16 bytes for each number, on 3 ranks", (138, 3, 4, 4, 8)),
    ("the same on 1 rank, in every stage", (138, 1, 4, 4, 8)),
    ("where R does not divide: the fullest rank", (9, 4, 3, 5, 7)),
)
# What is shown; then bytes of parameters, ranks, and bytes that are resident
TRAFFIC = (
    ("on 64 ranks, with nothing resident: 1x, 1x, 1x and 1.5x an all-reduce", (6.4e9, 64, 0)),
    ("what is resident in stage 3 is gathered once a step, on 3 ranks", (552, 3, 48)),
    ("one rank sends nothing", (552, 1, 48)),
)


def check_zero_memory(zero_memory):
    for holds, case in MEMORY:
        for stage in range(4):
            _compare_states(zero_memory(stage, *case), stage, *case)
        yield holds
    refuses_all(zero_memory, NO_STAGE, SAY)
    yield "another stage than 0 to 3 is refused with a ValueError"


def _compare_states(got, stage, parameters, ranks, *nbytes):
    nbytes = nbytes or (2, 2, 12)
    where = (f"stage {stage}, {parameters:g} parameters on {count_ranks(ranks)}, {nbytes} bytes "
             "a number")
    expect(all(hasattr(got, kind) for kind in FROM), f"{where}: it returned {got!r}",
           "Return States(parameters, gradients, optimizer_state).")
    for (kind, first), width in zip(FROM.items(), nbytes):
        name, own = kind.replace("_", " "), parameters
        hint = (f"Stage {stage} keeps the {name} whole on each rank; stage {first} is the first "
                f"that shards them. They take {width} bytes for each number.")
        if stage >= first:
            own = -(-parameters // ranks)
            hint = (f"From stage {first} on each rank holds 1/R of the {name}, {width} bytes for "
                    "each number. A number is whole: round up, the fullest rank has "
                    f"ceil({parameters:g} / {ranks}).")
        explain(f"{where}: {name} in bytes", getattr(got, kind), own * width, {
            "one byte for each number": (own, f"One takes {width} bytes."),
            "4 bytes for each number": (4 * own, f"By default this is mixed precision: {width} "
                                        f"bytes for each of the {name}, not float32's 4."),
            "8 bytes for each number": (8 * own, "Adam has two moments, and mixed precision keeps "
                                        "float32 master weights too: 12 bytes."),
        }, hint)


def check_zero_traffic(zero_traffic):
    for holds, case in TRAFFIC:
        for stage in range(4):
            _compare_sent(zero_traffic(stage, *case), stage, *case)
        yield holds
    refuses_all(zero_traffic, NO_STAGE, SAY)
    yield "another stage than 0 to 3 is refused with a ValueError"


def _compare_sent(got, stage, nbytes, ranks, resident):
    once, has_own = (ranks - 1) / ranks, "A rank has its own R-th part already: (R-1)/R."
    right = once * (3 * nbytes - resident if stage == 3 else 2 * nbytes)
    where = f"stage {stage}, {nbytes:,.10g} bytes on {count_ranks(ranks)}, {resident} resident"
    explain(f"{where}: sent", got, right, {
        "what an all-reduce sends": (2 * once * nbytes, "Stage 3 sends more than an all-reduce: "
                                     "parameters travel twice, for forward and for backward, and "
                                     "gradients once."),
        "what stage 3 sends": (once * (3 * nbytes - resident), "Only stage 3 gathers parameters "
                               "for backward once more."),
        "three collectives": (3 * once * nbytes, "Only stage 3 makes three, and what is resident "
                              "is gathered once in a step, not twice."),
        "too little": (once * (3 * nbytes - 2 * resident), "What is resident is gathered once in a "
                       "step, too: take resident_bytes off once."),
        "1.5 collectives": (1.5 * once * nbytes, "1.5 times an all-reduce, which sends 2 (R-1)/R "
                            "of the bytes."),
        "one collective": (once * nbytes, "That is the reduce-scatter alone. An all-gather of the "
                           "stepped parameters follows."),
        "what all ranks send": (right * ranks, "That is all ranks together; each of them sends the "
                                "R-th part."),
        "two whole ones": (2 * nbytes, has_own), "three whole ones": (3 * nbytes, has_own),
    }, "A reduce-scatter or an all-gather sends (R-1)/R of the whole bytes. How many of each does "
       "the stage make in a step?")


def refuses_all(fn, bad, hint):
    """Each of {what is wrong: the arguments} makes `fn` raise a ValueError; else a Mistake."""
    for what, arguments in bad.items():
        expect(refuses(fn, *arguments), f"{what}: no ValueError", hint)
