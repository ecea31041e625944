"""The check of offload_optimizer: the same weights, and the state is where it belongs."""

from functools import partial

from ranklab.checks.beside import expect, located
from ranklab.checks.zero.stage3 import Units
from ranklab.checks.zero.stages import Buckets, FreedBuckets
from ranklab.checks.zero.toys import storages
from ranklab.checks.zero.training import RUNS, on_ranks_together, train
from ranklab.zero import CpuMemory, ZeroStage1, ZeroStage2, ZeroStage3

STAGES = (ZeroStage1, Buckets), (ZeroStage2, FreedBuckets), (ZeroStage3, Units)
STEPS = 2  # of RUNS[2]
FAILURES = {
    ".*the step: bytes sent.*":
        "make_optimizer() has registered step_ends(): don't remove it, and don't register it "
        "again.",
    "AttributeError: 'NoneType' object has no attribute 'zero_grad'": "Return the optimizer.",
    ".*, step .*": "Masters are set first; then model.make_optimizer(new_optimizer, groups).",
}


class _Place:
    """Another place than CpuMemory: it notes the shards' copies, and what state came each time."""

    def __init__(self):
        self.copies, self.states = [], []

    def copy(self, tensor):
        self.copies.append(CpuMemory().copy(tensor))
        return self.copies[-1]

    def take_state(self, optimizer):
        self.states.append(len(optimizer.state))


def _trial(offload_optimizer, ranks):
    for stage, (wrapped_class, watch) in enumerate(STAGES, 1):
        for run, place in (RUNS[2], _Place()), (RUNS[3], None), (RUNS[0], None):
            make = partial(_offloaded, offload_optimizer, place)
            made = yield from train(wrapped_class, ranks, watch, runs=[run], make_optimizer=make)
            yield partial(located, f"{ranks}, stage {stage}", _compare_places, *made, place)


def _offloaded(offload_optimizer, place, wrapped, new_optimizer):
    """With groups where there is a place: an option that no optimizer reads tells them apart."""
    named = [(name, p) for name, p in wrapped.module.named_parameters() if p.requires_grad]
    groups = [{"params": [each for each in named if (each[1].dim() > 1) == are_matrices],
               "are_matrices": are_matrices} for are_matrices in (True, False)]
    return offload_optimizer(wrapped, new_optimizer, groups if place else None, place)


def _compare_places(wrapped, optimizer, place):
    masters = [p for group in optimizer.param_groups for p in group["params"] if p.numel()]
    of_model = [x for bucket in wrapped.buckets for x in (bucket.shard, bucket.weights)]
    expect(not storages(of_model) & storages(masters), "the optimizer's parameters are the model's "
           "own memory", "Each bucket gets a master elsewhere, before the optimizer is made: "
           "bucket.set_master(place.copy(bucket.shard)).")
    expect(all(p.itemsize >= 4 and p.device.type == "cpu" for p in masters), "the optimizer's "
           "parameters have 16 bits, or lie on a GPU", "Use what place.copy() returns, unchanged.")
    if not place:
        return
    expect(storages(masters) <= storages(place.copies), "the optimizer's parameters are not what "
           "`place` has copied", "CpuMemory() is only for where no place is given.")
    copies, buckets, groups = len(place.copies), len(wrapped.buckets), optimizer.param_groups
    expect(copies <= buckets, f"the place has copied {copies} shards, and there are {buckets} "
           "buckets", "One master for each bucket. A second copy takes as much memory again.")
    expect([group.get("are_matrices") for group in groups] == [True, False], f"the optimizer has "
           f"{len(groups)} groups, not the two that were given with their options",
           "model.make_optimizer(new_optimizer, groups): the groups go with it.")
    taken = sum(n > 0 for n in place.states)
    expect(taken == len(place.states) == STEPS, "the place got the optimizer's state after "
           f"{taken} of {STEPS} "
           "steps", "The first step makes the state, so the place takes it after "
           "each: optimizer.register_step_post_hook(lambda *_: place.take_state(optimizer)).")


def check_offload_optimizer(offload_optimizer):
    on_ranks_together(_trial, offload_optimizer, ranks=2, failures=FAILURES)
    yield "masters lie at the place, apart from the model's memory: stages 1, 2 and 3"
    yield "all weights are those of one process; no byte more travels between ranks"
    yield "groups keep their options; in bfloat16 the masters are float32"
    yield "the place takes the state after every step"
