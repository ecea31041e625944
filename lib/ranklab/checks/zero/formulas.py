"""The checks of zero_memory and zero_traffic: the paper's numbers, and those of a real step."""

import functools

import torch
from torch import nn

from ranklab.checks.exercise import Mistake
from ranklab.checks.trial import is_near, on_ranks
from ranklab.data_parallel import OverlappedDataParallel
from ranklab.engine import device
from ranklab.meter import Traffic, memory_of
from ranklab.zero import ZeroStage1, ZeroStage2, ZeroStage3

STAGES = OverlappedDataParallel, ZeroStage1, ZeroStage2, ZeroStage3
KINDS = "parameters", "gradients", "optimizer_state"
FROM = {"parameters": 3, "gradients": 2, "optimizer_state": 1}  # the stage that shares them out
TOTAL, OUTSIDE = 3 * 42 + 12, 12  # numbers; 1, 2 and 3 divide both, and 42


class Blocks(nn.Module):
    """Three blocks of 42 numbers, which are units, and 12 outside; all trained, in float32."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 6, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        return functools.reduce(lambda y, block: torch.tanh(block(y)), self.blocks, self.first(x))


def _count():
    """For each stage, in its second step: bytes of KINDS between backward and step; bytes sent."""
    counted, x = [], torch.ones(2, 2, device=device())
    for wrapped_class in STAGES:
        wrapped = wrapped_class(Blocks().to(device()))
        stage0 = wrapped_class is OverlappedDataParallel
        adam = functools.partial(torch.optim.AdamW, lr=0.01)
        optimizer = adam(wrapped.parameters()) if stage0 else wrapped.make_optimizer(adam)
        for _ in range(2):
            optimizer.zero_grad()
            with Traffic() as traffic:
                wrapped(x).sum().backward()
                shards = [] if stage0 else [bucket.shard for bucket in wrapped.buckets]
                held = memory_of(wrapped, optimizer, shards=shards)
                steps = sum(state["step"].nbytes for state in optimizer.state.values())
                optimizer.step()
        counted.append((held.parameters, held.gradients, held.optimizer_state - steps,
                        traffic.sent_bytes))
    return counted


def check_zero_memory(zero_memory):
    for stage in range(4):
        each = [7.5e9 / 64 if stage >= FROM[kind] else 7.5e9 for kind in KINDS]
        _compare_states(zero_memory(stage, 7.5e9, 64), stage, 7.5e9, 64, each, (2, 2, 12))
    yield "7.5 billion parameters on 64 GPUs: 120, 31.4, 16.6 and 1.9 GB, as in the paper"
    for ranks in (3, 1):
        for stage, counted in enumerate(on_ranks(_count, ranks=ranks)[0]):
            got = zero_memory(stage, TOTAL, ranks, 4, 4, 8)
            each = [n / nbytes for n, nbytes in zip(counted, (4, 4, 8))]
            _compare_states(got, stage, TOTAL, ranks, each, (4, 4, 8))
    yield "float32 with Adam on 1 and 3 ranks: every byte that is counted in a real step"
    for stage in range(4):
        each = [3 if stage >= FROM[kind] else 10 for kind in KINDS]
        _compare_states(zero_memory(stage, 10, 4, 2, 4, 6), stage, 10, 4, each, (2, 4, 6))
    yield "where R does not divide: the fullest rank"
    _refuses(zero_memory)
    yield "another stage than 0 to 3 is refused with a ValueError"


def _compare_states(got, stage, parameters, ranks, each, nbytes):
    where = f"stage {stage}, {parameters:g} parameters on {ranks} ranks, {nbytes} bytes a number"
    if not all(hasattr(got, kind) for kind in KINDS):
        raise Mistake(f"{where}: it returned {got!r}", "Return "
                      "States(parameters, gradients, optimizer_state).")
    for kind, numbers, width in zip(KINDS, each, nbytes):
        found, right = getattr(got, kind), numbers * width
        if not is_near(found, right):
            name = kind.replace("_", " ")
            said = found if isinstance(found, str) else f"{found:,.10g}"
            raise Mistake(f"{where}: {name} of {said} bytes, not {right:,.10g}",
                          _memory_hint(kind, found, stage, parameters, ranks, right, width))


def _memory_hint(kind, found, stage, parameters, ranks, right, width):
    whole, name = parameters * width, kind.replace("_", " ")
    shares, fullest = stage >= FROM[kind], f"the fullest has ceil({parameters:g} / {ranks})"
    keeps = (f"Stage {stage} keeps the {name} whole on each rank; stage {FROM[kind]} is the first "
             "that shares them out.")
    slips = (
        (right / width, "These are numbers; multiply by the bytes of one."),
        (8 * right, "These are bits; a byte has 8."),
        (parameters // ranks * width, f"Round up: {fullest}." if shares else keeps),
        (parameters / ranks * width, f"A rank holds whole numbers: {fullest}." if shares
         else keeps),
        (-(-parameters // ranks) * width, keeps),
        (whole, f"From stage {FROM[kind]} on each rank holds 1/R of the {name}."),
        (2 * right, f"By default this is mixed precision: {width} bytes for each of the {name}, "
         "not float32's 4."),
        (right * 8 / 12, "Adam has two moments, and mixed precision keeps float32 master weights "
         "too: 12 bytes."),
        (right * ranks, "That is all ranks together."),
        (right / ranks, "Divide by R once."),
    )
    return next((hint for wrong, hint in slips if is_near(found, wrong)),
                f"{width} bytes for each of the numbers that this rank holds.")


def check_zero_traffic(zero_traffic):
    for ranks in (3, 1):
        for stage, (*_, sent) in enumerate(on_ranks(_count, ranks=ranks)[0]):
            got = zero_traffic(stage, 4 * TOTAL, ranks, 4 * OUTSIDE)
            _compare_sent(got, stage, 4 * TOTAL, ranks, 4 * OUTSIDE, sent)
    yield "every byte that a real step sends, on 1 and 3 ranks; stage 3 keeps 12 of 138 numbers"
    for stage, times in enumerate((2, 2, 2, 3)):
        _compare_sent(zero_traffic(stage, 6.4e9, 64), stage, 6.4e9, 64, 0, times * 6.3e9)
    yield "on 64 ranks, with nothing resident: 1x, 1x, 1x and 1.5x an all-reduce"
    _refuses(zero_traffic)
    yield "another stage than 0 to 3 is refused with a ValueError"


def _compare_sent(got, stage, nbytes, ranks, resident, right):
    if is_near(got, right):
        return
    once = (ranks - 1) / ranks
    has_own = "A rank has its own R-th part already: (R-1)/R of the bytes."
    slips = (
        ((2 if stage < 3 else 3) * nbytes, has_own),
        (2 * once * nbytes, "Stage 3 sends more than an all-reduce: parameters travel twice, for "
         "forward and for backward, and gradients once."),
        (3 * once * nbytes, "What is resident is gathered once in a step, not twice." if stage > 2
         else "Only stage 3 gathers parameters for backward once more."),
        (once * (3 * nbytes - resident), "Only stage 3 gathers parameters for backward once more."),
        (once * (3 * nbytes - 2 * resident), "What is resident is gathered once in a step, too: "
         "take resident_bytes off once."),
        (3 * nbytes - resident, has_own),
        (once * (2 * nbytes - resident), "Only stage 3 keeps anything resident; the others send "
         "what one all-reduce sends."),
        (once * nbytes, "That is the reduce-scatter alone. An all-gather of the stepped "
         "parameters follows."),
        (1.5 * once * nbytes, "1.5 times an all-reduce, which sends 2 (R-1)/R of the bytes."),
        (right * ranks, "That is all ranks together; each of them sends the R-th part."),
    )
    raise Mistake(f"stage {stage}, {nbytes:,.10g} bytes on {ranks} ranks, {resident} resident: "
                  f"{got:,.10g} bytes sent, not {right:,.10g}",
                  next((hint for wrong, hint in slips if is_near(got, wrong)),
                       "A reduce-scatter or an all-gather sends (R-1)/R of the whole bytes. How "
                       "many of each does the stage make in a step?"))


def _refuses(formula):
    for stage in (4, -1):
        try:
            got = formula(stage, 12, 2)
        except ValueError:
            continue
        except (KeyError, IndexError, TypeError) as error:
            got = f"a {type(error).__name__}"
        raise Mistake(f"stage={stage} gives {got}", "Say what is wrong: raise ValueError(...).")
