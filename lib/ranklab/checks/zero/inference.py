"""The check of ZeroInference: the forward of one process; gathered and freed at the right time."""

from functools import partial

import torch
import torch.distributed as dist

from ranklab.checks.prover import GROUPS, AtMost, Proof, Slip, Stage
from ranklab.checks.zero.stage3 import CALLS, SENT, TIMES, Units
from ranklab.checks.zero.toys import Toy, loss_of, seeded
from ranklab.checks.zero.training import RUNS, InUnits, Run
from ranklab.zero.inference import ZeroInference

TWICE = Run("a block used twice", partial(Toy, order=(0, 1, 2, 3, 0)), None)
MODELS = (RUNS[0]._replace(what="four blocks of two types"), TWICE,
          RUNS[-1]._replace(what="in bfloat16"))
COST = SENT, CALLS


class Forward(Units):
    """The observations of a forward, and that it gathers each unit once."""

    def of_forward(self):
        whole = sum(bucket.weights.nbytes for bucket in self.wrapped.buckets)
        cost = {SENT: AtMost(self.traffic.sent_bytes, self.once * whole,
                             "sends {:,.0f} bytes in a forward; {:,.0f} are enough"),
                CALLS: AtMost(len(self.traffic.ops), len(self.wrapped.buckets))}
        return super().of_forward() | (cost if self.is_used_once else {})


def _see(fn, run, ranks):
    wrapped = fn(seeded(lambda: run.new_model(None), dist.get_rank()), **ranks.keywords).eval()
    for batch in range(3):
        with torch.no_grad(), Forward(wrapped) as watch:
            loss = loss_of(wrapped, 10 * batch + dist.get_rank())
            watch.forward_ends()
        yield {"the loss": loss} | watch.of_forward()


GATHER, FREE = "unit.end_gather()", "unit.free()"
NEXT = "self.prefetch(self.place_in_order(unit) + 1)"

INFERENCE = Proof(
    ZeroInference,
    Stage({"the losses of one process, in three forwards, on 1 and 3 ranks": (),
           "tied, float64, bfloat16, a unit that is used twice": (),
           "a unit is whole while it computes, and the next is on its way; then it is freed": TIMES,
           "a forward gathers all parameters once: (R-1)/R of their bytes": COST},
          _see, MODELS, (3, 1), oracle=InUnits, through=torch.float32),
    Stage("inside a group it talks only to that group's ranks", _see, MODELS[:1], (4,), GROUPS[:1],
          oracle=InUnits, through=torch.float32),
    mistakes=(
        Slip("enter() must gather the unit and wait for it: unit.end_gather().",
             (GATHER, "pass"), (GATHER, "unit.begin_gather()")),
        Slip("leave() frees the unit: unit.free().", (FREE, "pass")),
        Slip("enter() starts gathering the next unit: self.prefetch(self.place_in_order(unit) + "
             "1).", (NEXT, "self.place_in_order(unit)"), (NEXT, NEXT.replace(" + 1", ""))),
        Slip("Each forward of a unit has one place in the order: call self.place_in_order(unit) "
             "once.",
             (NEXT, "self.prefetch(max(self.place_in_order(unit), self.place_in_order(unit)) + 1)"
              )),
        Slip("Call self.place_in_order(unit): unless each unit's place is recorded, the next unit "
             "is unknown.", (NEXT, "pass"), (NEXT, "self.prefetch(self.position + 1)")),
        Slip("Gather the next unit while this one computes: self.prefetch() starts the gather "
             "without waiting for it.",
             (NEXT, "place = self.place_in_order(unit) + 1\n        if place < len(self.order):\n"
              "            self.order[place].end_gather()")),
        Slip("Prefetch only one unit, the next: otherwise more than two are whole.",
             (NEXT, "place = self.place_in_order(unit)\n        self.prefetch(place + 1)\n        "
              "self.prefetch(place + 2)"),
             (NEXT, "self.place_in_order(unit)\n        for place in range(len(self.order)):\n"
              "            self.prefetch(place)")),
    ), hints=(
        "During a forward, from when until when does a unit need its weights?",
        "enter() waits for this unit's weights, and starts gathering the unit at the next place. "
        "leave() frees this unit.",
        "enter(): unit.end_gather(); self.prefetch(self.place_in_order(unit) + 1). leave(): "
        "unit.free().",
    ))
