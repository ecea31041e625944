"""The check of offload_optimizer: the same weights, and the state is where it belongs."""

import torch
from torch import nn

from ranklab.checks.exercise import Mistake
from ranklab.checks.trial import explain, on_ranks, rank_name
from ranklab.checks.zero.toys import ADAMW, Toy, loss_of, seeded
from ranklab.engine import device
from ranklab.meter import Traffic
from ranklab.zero import CpuMemory, ZeroStage1, ZeroStage2, ZeroStage3

STAGES = ZeroStage1, ZeroStage2, ZeroStage3
STEPS = 3


class _Noting(CpuMemory):
    """A place that notes what it was given, and how often the state came."""

    def __init__(self):
        self.memory, self.states = set(), []

    def copy(self, tensor):
        there = super().copy(tensor)
        self.memory.add(there.untyped_storage().data_ptr())
        return there

    def take_state(self, optimizer):
        self.states.append(len(optimizer.state))


def _halves():
    return nn.Linear(5, 3).bfloat16()


def _trained(wrapped_class, make_optimizer, new_model, groups_of=lambda model: None):
    """After STEPS steps: (weights, bytes sent, the model, its optimizer)."""
    wrapped = wrapped_class(seeded(new_model, 0))
    optimizer, steps = make_optimizer(wrapped, groups_of(wrapped.module)), 0
    with Traffic() as traffic:
        while steps < STEPS:
            optimizer.zero_grad()
            loss = (loss_of(wrapped, steps) if new_model is Toy else
                    wrapped(torch.ones(2, 5, dtype=torch.bfloat16, device=device())).sum())
            loss.backward()
            optimizer.step()
            steps += 1
    weights = {name: value.cpu().float().clone() for name, value in wrapped.state_dict().items()}
    return weights, traffic.sent_bytes, wrapped, optimizer


def _groups(model):
    """Weight decay of matrices only; the norm is in no group."""
    named = [(name, p) for name, p in model.named_parameters()
             if p.requires_grad and not name.startswith("norm")]
    return [{"params": [each for each in named if each[1].dim() > 1], "weight_decay": 5.0},
            {"params": [each for each in named if each[1].dim() == 1], "weight_decay": 0.0}]


def _trial(offload_optimizer):
    return [_in_stage(offload_optimizer, stage) for stage in STAGES]


def _in_stage(offload_optimizer, wrapped_class):
    """What each case gives, beside the optimizer that is where the parameters are."""
    cases, place = {}, _Noting()
    for case, new_model, groups_of, where in (
            ("", Toy, lambda model: None, place), ("groups: ", Toy, _groups, None),
            ("bfloat16: ", _halves, lambda model: None, None)):
        right, sent, *_ = _trained(wrapped_class, lambda model, groups: model.make_optimizer(
            ADAMW, groups), new_model, groups_of)
        got, got_sent, wrapped, optimizer = _trained(
            wrapped_class, lambda model, groups: offload_optimizer(model, ADAMW, groups, where),
            new_model, groups_of)
        masters = [p for group in optimizer.param_groups for p in group["params"]]
        beside = {x.untyped_storage().data_ptr() for bucket in wrapped.buckets
                  for x in (bucket.shard, bucket.weights)}
        state = [x for each in optimizer.state.values() for x in each.values()]
        cases[case] = {
            "got": got, "right": right, "sent": (got_sent, sent),
            "shared": sum(p.untyped_storage().data_ptr() in beside for p in masters),
            "narrow": sum(p.itemsize < 4 for p in masters),
            "elsewhere": {x.device.type for x in (*masters, *state)} - {"cpu"},
            "not copied": sum(p.untyped_storage().data_ptr() not in place.memory for p in masters)
            if where else 0}
    return cases, place.states


def check_offload_optimizer(offload_optimizer):
    seen = on_ranks(_trial, offload_optimizer, ranks=2)
    for rank, stages in enumerate(seen):
        for stage, (cases, states) in enumerate(stages):
            for case, found in cases.items():
                where = f"{rank_name(rank, 2)}, stage {stage + 1}, {case}"
                _compare_places(where.rstrip(":, "), found)
                _compare_weights(where.rstrip(":, "), found)
            _compare_states(f"{rank_name(rank, 2)}, stage {stage + 1}", states)
    yield "masters lie at the place, apart from the model's memory: stages 1, 2 and 3"
    yield "after three steps all weights are those of make_optimizer()"
    yield "groups keep their options; in bfloat16 the masters are float32"
    yield "the place takes the state after every step; no byte more travels between ranks"


def _compare_places(where, found):
    if found["shared"]:
        raise Mistake(f"{where}: {found['shared']} of the optimizer's parameters are the model's "
                      "own memory", "Each bucket gets a master elsewhere, before the optimizer is "
                      "made: bucket.set_master(place.copy(bucket.shard)).")
    if found["not copied"]:
        raise Mistake(f"{where}: {found['not copied']} of the optimizer's parameters are not what "
                      "`place` has copied", "The place says where memory is: place.copy(...), "
                      "CpuMemory() only where no place is given.")
    if found["narrow"]:
        raise Mistake(f"{where}: {found['narrow']} of the optimizer's parameters have 16 bits",
                      "Masters are float32 or better: place.copy() makes them so.")
    if found["elsewhere"]:
        raise Mistake(f"{where}: something lies on {found['elsewhere']}", "Masters and state "
                      "belong to the CPU here.")


def _compare_weights(where, found):
    for name, right in found["right"].items():
        explain(f"{where}: `{name}` after {STEPS} steps", found["got"][name], right, hint="Masters "
                "are set first; then model.make_optimizer(new_optimizer, groups), whose step ends "
                "with model.step_ends(). Once is enough, and the groups go with it.")
    got, right = found["sent"]
    if got != right:
        raise Mistake(f"{where}: {got:,} bytes sent between ranks; make_optimizer() sends "
                      f"{right:,}", "Offloading is between this rank and its CPU: make_optimizer() "
                      "has registered step_ends() already.")


def _compare_states(where, states):
    if len(states) != STEPS or not all(states):
        raise Mistake(f"{where}: in {STEPS} steps the place got the optimizer's state "
                      f"{len(states)} times", "The first step makes the state, so the place takes "
                      "it after each: optimizer.register_step_post_hook(lambda *_: "
                      "place.take_state(optimizer)).")
