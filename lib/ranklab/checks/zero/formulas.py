"""The checks of zero_memory and zero_traffic: the paper's numbers, and those of a real step."""

import functools

import torch
from torch import nn

from ranklab.checks.exercise import Mistake
from ranklab.checks.trial import explain, on_ranks
from ranklab.checks.zero.toys import ADAMW
from ranklab.data_parallel import OverlappedDataParallel
from ranklab.engine import device
from ranklab.meter import Traffic, memory_of
from ranklab.zero import ZeroStage1, ZeroStage2, ZeroStage3

STAGES = OverlappedDataParallel, ZeroStage1, ZeroStage2, ZeroStage3
FROM = {"parameters": 3, "gradients": 2, "optimizer_state": 1}  # the stage that shares them out
TOTAL, OUTSIDE = 3 * 42 + 12, 12  # numbers of _blocks(); 1, 2 and 3 divide both, and 42


def _blocks():
    """Three blocks of 42 numbers, which are units, and 12 outside; all trained, in float32."""
    first, blocks = nn.Linear(2, 6, bias=False), nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
    module = nn.Sequential(first, blocks)
    module.forward = lambda x: functools.reduce(lambda y, block: block(y).tanh(), blocks, first(x))
    return module.to(device())


def _count():
    """For each stage, in its second step: (bytes of FROM's between backward and step, bytes
    sent).
    """
    counted = []
    for wrapped_class in STAGES:
        wrapped = wrapped_class(_blocks())
        stage0 = wrapped_class is OverlappedDataParallel
        optimizer = ADAMW(wrapped.parameters()) if stage0 else wrapped.make_optimizer(ADAMW)
        for _ in range(2):
            optimizer.zero_grad()
            with Traffic() as traffic:
                wrapped(torch.ones(2, 2, device=device())).sum().backward()
                shards = [] if stage0 else [bucket.shard for bucket in wrapped.buckets]
                held = memory_of(wrapped, optimizer, shards=shards)
                steps = sum(state["step"].nbytes for state in optimizer.state.values())
                optimizer.step()
        counted.append(((held.parameters, held.gradients, held.optimizer_state - steps),
                        traffic.sent_bytes))
    return counted


def check_zero_memory(zero_memory):
    for stage in range(4):
        _compare_states(zero_memory(stage, 7.5e9, 64), stage, 7.5e9, 64, (2, 2, 12))
    yield "7.5 billion parameters on 64 GPUs: 120, 31.4, 16.6 and 1.9 GB, as in the paper"
    for ranks in (3, 1):
        for stage, (counted, _) in enumerate(on_ranks(_count, ranks=ranks)[0]):
            got = zero_memory(stage, TOTAL, ranks, 4, 4, 8)
            _compare_states(got, stage, TOTAL, ranks, (4, 4, 8), counted)
    yield "float32 with Adam on 1 and 3 ranks: every byte that is counted in a real step"
    for stage in range(4):
        _compare_states(zero_memory(stage, 10, 4, 3, 5, 7), stage, 10, 4, (3, 5, 7))
    yield "where R does not divide: the fullest rank"
    _refuses(zero_memory)
    yield "another stage than 0 to 3 is refused with a ValueError"


def _compare_states(got, stage, parameters, ranks, nbytes, counted=None):
    where = f"stage {stage}, {parameters:g} parameters on {ranks} ranks, {nbytes} bytes a number"
    if not all(hasattr(got, kind) for kind in FROM):
        raise Mistake(f"{where}: it returned {got!r}", "Return "
                      "States(parameters, gradients, optimizer_state).")
    for number, ((kind, first), width) in enumerate(zip(FROM.items(), nbytes)):
        name, own = kind.replace("_", " "), parameters
        hint = (f"Stage {stage} keeps the {name} whole on each rank; stage {first} is the first "
                f"that shares them out. They take {width} bytes for each number.")
        if stage >= first:
            own = -(-parameters // ranks)
            hint = (f"From stage {first} on each rank holds 1/R of the {name}, {width} bytes for "
                    "each number. A number is whole: round up, the fullest rank has "
                    f"ceil({parameters:g} / {ranks}).")
        right = counted[number] if counted else own * width
        explain(f"{where}: {name} in bytes", getattr(got, kind), right, {
            "one byte for each number": (own, f"One takes {width} bytes."),
            "4 bytes for each number": (4 * own, f"By default this is mixed precision: {width} "
                                        f"bytes for each of the {name}, not float32's 4."),
            "8 bytes for each number": (8 * own, "Adam has two moments, and mixed precision keeps "
                                        "float32 master weights too: 12 bytes."),
        }, hint)


def check_zero_traffic(zero_traffic):
    for stage, times in enumerate((2, 2, 2, 3)):
        _compare_sent(zero_traffic, stage, 6.4e9, 64, 0, times * 6.3e9)
    yield "on 64 ranks, with nothing resident: 1x, 1x, 1x and 1.5x an all-reduce"
    for ranks in (3, 1):
        for stage, (_, sent) in enumerate(on_ranks(_count, ranks=ranks)[0]):
            _compare_sent(zero_traffic, stage, 4 * TOTAL, ranks, 4 * OUTSIDE, sent)
    yield "every byte that a real step sends, on 1 and 3 ranks; stage 3 keeps 12 of 138 numbers"
    _refuses(zero_traffic)
    yield "another stage than 0 to 3 is refused with a ValueError"


def _compare_sent(zero_traffic, stage, nbytes, ranks, resident, right):
    once, has_own = (ranks - 1) / ranks, "A rank has its own R-th part already: (R-1)/R."
    explain(f"stage {stage}, {nbytes:,.10g} bytes on {ranks} ranks, {resident} resident: sent",
            zero_traffic(stage, nbytes, ranks, resident), right, {
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


def _refuses(formula):
    for stage in (4, -1):
        try:
            got = formula(stage, 12, 2)
        except ValueError:
            continue
        raise Mistake(f"stage={stage} gives {got}", "Say what is wrong: raise ValueError(...).")
