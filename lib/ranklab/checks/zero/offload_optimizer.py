"""The check of offload_optimizer: the same weights, and the state is where it belongs."""

import tempfile
from functools import partial

from ranklab.checks.beside import located
from ranklab.checks.exercise import Mistake
from ranklab.checks.zero.stage3 import Units
from ranklab.checks.zero.stages import Buckets, FreedBuckets
from ranklab.checks.zero.training import WAYS, on_ranks_together, train
from ranklab.zero import Files, ZeroStage1, ZeroStage2, ZeroStage3

STAGES = (ZeroStage1, Buckets), (ZeroStage2, FreedBuckets), (ZeroStage3, Units)
STEPS = 2
FAILURES = {
    ".*the step: bytes sent.*": "make_optimizer() has registered step_ends(): neither remove it "
    "nor add it once more.",
    "AttributeError: 'NoneType' object has no attribute 'zero_grad'": "Return the optimizer.",
    ".*, step .*": "Masters are set first; then model.make_optimizer(new_optimizer, groups), whose "
    "step ends with model.step_ends().",
}


class _Noting(Files):
    """Files; notes what they were given, and how much state came after each step."""

    def __init__(self, folder):
        super().__init__(folder)
        self.memory, self.states, self.shards = set(), [], 0

    def copy(self, tensor):
        there = super().copy(tensor)
        self.memory.add(there.untyped_storage().data_ptr())
        self.shards += not self.states  # later come copies of the state
        return there

    def take_state(self, optimizer):
        self.states.append(len(optimizer.state))
        super().take_state(optimizer)


def _trial(offload_optimizer, ranks):
    for stage, (wrapped_class, watch) in enumerate(STAGES, 1):
        where, made = f"{ranks}, stage {stage}", {}
        files = tempfile.TemporaryDirectory()
        for way, place in (WAYS[2], _Noting(files.name)), (WAYS[3], None), (WAYS[0], None):
            def offloaded(wrapped, new_optimizer):
                groups = _groups(wrapped.module) if place else None
                made[place] = wrapped, offload_optimizer(wrapped, new_optimizer, groups, place)
                return made[place][1]

            yield from train(wrapped_class, ranks, watch, ways=[way], make_optimizer=offloaded)
            yield partial(located, where, _compare_places, *made[place], place)
        files.cleanup()


def _groups(model):
    """Of matrices and of all others; an option that no optimizer reads tells which is which."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [{"params": [each for each in named if (each[1].dim() > 1) == are_matrices],
             "are_matrices": are_matrices} for are_matrices in (True, False)]


def _compare_places(wrapped, optimizer, place):
    masters = [p for group in optimizer.param_groups for p in group["params"] if p.numel()]
    lies = {p.untyped_storage().data_ptr() for p in masters}
    models = {x.untyped_storage().data_ptr() for bucket in wrapped.buckets
              for x in (bucket.shard, bucket.weights)}
    if models & lies:
        raise Mistake("the optimizer's parameters are the model's own memory", "Each bucket gets a "
                      "master elsewhere, before the optimizer is made: "
                      "bucket.set_master(place.copy(bucket.shard)).")
    if place and lies - place.memory:
        raise Mistake("the optimizer's parameters are not what `place` has copied", "The place "
                      "says where memory is: place.copy(...), CpuMemory() only where no place is "
                      "given.")
    if any(p.itemsize < 4 or p.device.type != "cpu" for p in masters):
        raise Mistake("the optimizer's parameters have 16 bits, or lie on a GPU",
                      "Masters are float32 or better, on the CPU: place.copy() makes them so.")
    if place and place.shards > len(wrapped.buckets):
        raise Mistake(f"the place has copied {place.shards} shards, and there are "
                      f"{len(wrapped.buckets)} buckets", "One master for each bucket. A second "
                      "copy takes as much memory again.")
    if place and [group.get("are_matrices") for group in optimizer.param_groups] != [True, False]:
        raise Mistake(f"the optimizer has {len(optimizer.param_groups)} groups, not the two that "
                      "were given with their options",
                      "model.make_optimizer(new_optimizer, groups): the groups go with it.")
    if place and (len(place.states) != STEPS or not all(place.states)):
        raise Mistake(f"of {STEPS} steps the place got the optimizer's state after "
                      f"{len([n for n in place.states if n])}", "The first step makes the state, "
                      "so the place takes it after each: optimizer.register_step_post_hook("
                      "lambda *_: place.take_state(optimizer)).")
    states = [x for state in optimizer.state.values() for x in state.values()
              if getattr(x, "ndim", 0)]
    if place and {x.untyped_storage().data_ptr() for x in states} - place.memory:
        raise Mistake("the optimizer's state is not in the place's files", "The place moves what "
                      "optimizer.state has: place.take_state(optimizer), with this optimizer.")


def check_offload_optimizer(offload_optimizer):
    on_ranks_together(_trial, offload_optimizer, ranks=2, failures=FAILURES)
    yield "masters lie at the place, apart from the model's memory: stages 1, 2 and 3"
    yield "all weights are those of one process; no byte more travels between ranks"
    yield "groups keep their options; in bfloat16 the masters are float32"
    yield "the place, files here, takes the state after every step"
