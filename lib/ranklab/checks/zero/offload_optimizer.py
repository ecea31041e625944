"""The check of offload_optimizer: the same weights, and the state is where it belongs."""

from functools import partial
from typing import NamedTuple

import torch

from ranklab.checks.prover import AtMost, Must, Proof, Slip, Stage
from ranklab.checks.zero.stage3 import Units
from ranklab.checks.zero.stages import Buckets, FreedBuckets
from ranklab.checks.zero.toys import storages
from ranklab.checks.zero.training import RUNS, InOneProcess, InUnits, Run, see_training
from ranklab.zero import CpuMemory, ZeroStage1, ZeroStage2, ZeroStage3, offload_optimizer

STAGES = ((ZeroStage1, Buckets, InOneProcess), (ZeroStage2, FreedBuckets, InOneProcess),
          (ZeroStage3, Units, InUnits))


class Case(NamedTuple):
    """A run of one stage, with or without parameter groups and a Place."""

    stage: int
    run: Run
    has_place: bool

    def __str__(self):
        return f"stage {self.stage}, {self.run}" + ", `groups` and `place` given" * self.has_place


CASES = tuple(Case(stage, *case) for stage in (1, 2, 3)
              for case in ((RUNS[2], True), (RUNS[3], False), (RUNS[0], False)))
WITHOUT = "buckets that have no master of their own"
UNSTEPPED = "masters of this rank's parts that the optimizer does not have"
IN_MODEL, NARROW = "masters that lie in the model's own memory", "masters of 16 bits, or on a GPU"
ELSEWHERE, COPIES = "masters that are not copies of `place`", "shards that `place` has copied"
UNCOPIED = "shards that `place` has not copied"
OPTIONS = "the option `are_matrices` of the groups"
STATE = "whether `place` got a state after each step"


class Place:
    """A replacement for CpuMemory that records the shards' copies, and each state that arrives."""

    def __init__(self):
        self.copies, self.states = [], []

    def copy(self, tensor):
        self.copies.append(CpuMemory().copy(tensor))
        return self.copies[-1]

    def take_state(self, optimizer):
        self.states.append(len(optimizer.state) > 0)


def _see(fn, case, ranks):
    new, watch, oracle = STAGES[case.stage - 1]
    place = Place() if case.has_place else None
    yield from see_training(oracle if fn is without_offload else new, case.run, ranks, watch,
                            partial(_made_by, fn, place), partial(_places, place))
    if place:
        yield {STATE: Must(place.states, [True] * case.run.steps)}


def _made_by(fn, place, wrapped, new_optimizer):
    """Make it with groups if there is a place; an option that no optimizer reads marks them."""
    if not place:
        return fn(wrapped, new_optimizer)
    named = [(name, p) for name, p in wrapped.module.named_parameters() if p.requires_grad]
    groups = [{"params": [each for each in named if (each[1].dim() > 1) == are_matrices],
               "are_matrices": are_matrices} for are_matrices in (True, False)]
    return fn(wrapped, new_optimizer, groups, place)


def _places(place, wrapped, optimizer):
    """Return where the optimizer's parameters are before any step."""
    buckets, groups = wrapped.buckets, optimizer.param_groups
    trained = [bucket for bucket in buckets if any(p.requires_grad for p in bucket.parameters)]
    parts = {part.master for bucket in trained for part in bucket.parts}
    masters = [p for group in groups for p in group["params"] if p.numel()]
    of_model = storages(x for bucket in buckets for x in (bucket.shard, bucket.weights))
    own = [bucket for bucket in trained if not of_model & storages([bucket.master])]
    values = {WITHOUT: AtMost(len(trained) - len(own), 0),
              UNSTEPPED: AtMost(len(parts - {*masters}), 0),
              IN_MODEL: AtMost(len(of_model & storages(masters)), 0),
              NARROW: AtMost(sum(p.itemsize < 4 or p.device.type != "cpu" for p in masters), 0)}
    if place:
        values |= {
            ELSEWHERE: AtMost(len(storages(masters) - storages(place.copies)), 0),
            UNCOPIED: AtMost(max(0, len(trained) - len(place.copies)), 0),
            COPIES: AtMost(len(place.copies), len(buckets)),
            OPTIONS: Must([group.get("are_matrices") for group in groups], [True, False])}
    return values


def without_offload(model, new_optimizer, groups=None, place=None):
    return model.make_optimizer(new_optimizer, groups)


SET = "bucket.set_master(place.copy(bucket.shard))"
MAKE = "optimizer = model.make_optimizer(new_optimizer, groups)"
HOOK = "optimizer.register_step_post_hook(lambda *_: place.take_state(optimizer))"
PLACE, RETURN = "place = place or CpuMemory()", "    return optimizer"
FIRST = "Set the masters first; then call model.make_optimizer(new_optimizer, groups)."

OFFLOAD = Proof(
    offload_optimizer,
    Stage({"masters lie at the place, apart from the model's memory: stages 1, 2 and 3":
           (WITHOUT, UNSTEPPED, IN_MODEL, NARROW, ELSEWHERE, UNCOPIED, COPIES),
           "all weights are those of one process; no extra byte travels between ranks": (),
           "groups keep their options; in bfloat16 the masters are float32": (OPTIONS,),
           "the place takes the state after every step": (STATE,)},
          _see, CASES, (2,), oracle=without_offload, through=torch.float32),
    mistakes=(
        Slip("Before making the optimizer, give each bucket a master at the place: "
             "bucket.set_master(place.copy(bucket.shard)). (cpu() and float() copy nothing of a "
             "shard that is already float32 on the CPU.)", (SET, "pass")),
        Slip("Some buckets have no master at the place: call "
             "bucket.set_master(place.copy(bucket.shard)) for every bucket.",
             ("in model.buckets:", "in model.buckets[:1]:")),
        Slip(FIRST, (PLACE, f"{PLACE}\n    {MAKE}", f"    {MAKE}\n    {HOOK}", f"    {HOOK}")),
        Slip("Setting bucket.master alone is not enough: bucket.set_master() also recreates the "
             "optimizer's parts.", (SET, "bucket.master = place.copy(bucket.shard)")),
        Slip("Copy the shard, this rank's own part of bucket.weights.",
             (SET, SET.replace("bucket.shard", "bucket.weights"))),
        Slip("Use what place.copy() returns as the master, not a copy of it.",
             (SET, "bucket.set_master(place.copy(bucket.shard).clone())")),
        Slip("If a place is given, it makes the copies: place.copy(bucket.shard). CpuMemory() is "
             "only for when none is given.",
             (SET, "bucket.set_master(bucket.shard.detach().to('cpu', torch.promote_types("
              "bucket.shard.dtype, torch.float32), copy=True))"),
             (PLACE, "place = CpuMemory()"),
             (PLACE, "place = place if isinstance(place, CpuMemory) else CpuMemory()")),
        Slip("Offload even if no place is given: to CpuMemory().",
             (PLACE, "if place is None:\n        return model.make_optimizer(new_optimizer, groups)"
              )),
        Slip("CpuMemory is a class: make one, CpuMemory().", (PLACE, "place = place or CpuMemory")),
        Slip("One master per bucket is enough. A second copy takes the same amount of memory "
             "again.",
             (SET, f"{SET}\n        bucket.kept = place.copy(bucket.shard)")),
        Slip("Use what place.copy() returns, in float32 or better: don't round it to the shard's "
             "dtype.", ("place.copy(bucket.shard)",
                               "place.copy(bucket.shard).to(bucket.shard.dtype)")),
        Slip("Pass the groups on: model.make_optimizer(new_optimizer, groups).",
             ("(new_optimizer, groups)", "(new_optimizer)")),
        Slip("model.make_optimizer() knows which parts are this rank's: don't make the optimizer "
             "from the module's parameters.",
             (MAKE, "optimizer = new_optimizer(groups or [p for p in model.module.parameters() if "
              "p.requires_grad])")),
        Slip("Return the optimizer.", (RETURN, "")),
        Slip("The first step creates the state, so the place must take it after each step: "
             "optimizer.register_step_post_hook(lambda *_: place.take_state(optimizer)).",
             (HOOK, "place.take_state(optimizer)"), (HOOK, "pass"),
             (HOOK, HOOK.replace("post", "pre"))),
        Slip("The place must take the state after every step, not only after the first.",
             (HOOK, "taken = []\n    optimizer.register_step_post_hook(\n        lambda *_: taken "
              "or taken.append(place.take_state(optimizer)))")),
        Slip("make_optimizer() has already registered step_ends(): don't register it again.",
             (HOOK, f"{HOOK}\n    optimizer.register_step_post_hook(\n        lambda *_: "
              "model.step_ends())")),
        Slip("make_optimizer() has registered step_ends() as a hook: don't remove it.",
             (HOOK, f"optimizer._optimizer_step_post_hooks.clear()\n    {HOOK}")),
    ), hints=(
        "What does the optimizer update, and where else could that be kept?",
        "Each bucket has a master. set_master() replaces it, and must come before "
        "make_optimizer(). The place must also take the optimizer's state, which a step creates.",
        "bucket.set_master(place.copy(bucket.shard)) for each bucket; at the end "
        "optimizer.register_step_post_hook(lambda *_: place.take_state(optimizer))",
    ))
