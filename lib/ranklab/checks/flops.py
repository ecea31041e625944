"""FLOPs of a learner's code, by torch's formulas and for the in-place products that it omits."""

import torch
from torch.utils.flop_counter import flop_registry

FORMULAS = {**flop_registry,
            torch.ops.aten.addmm_: flop_registry[torch.ops.aten.addmm],
            torch.ops.aten.baddbmm_: flop_registry[torch.ops.aten.baddbmm]}


def add_flops(flops):
    """Return a look at each operation of a Watcher that appends its FLOPs to the list `flops`.

    FlopCounterMode can't follow each backward.
    """
    def look(func, args, kwargs, result):
        if formula := FORMULAS.get(func.overloadpacket):
            flops.append(formula(*args, **kwargs, out_val=result))
    return look
