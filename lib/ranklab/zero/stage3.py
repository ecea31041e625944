"""ZeRO's stage 3: a rank holds its shard of the parameters, and the rest while they are used."""

import contextlib
import functools

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from ranklab.data_parallel.replica import Replica
from ranklab.zero.owned import Owned
from ranklab.zero.units import Unit, call_after_backward, units_of


class ZeroStage3(Owned, Replica):
    """`module`, of which each rank holds the R-th part, and each unit as a whole while it runs.

    A unit is gathered before its forward and freed after it; the same in backward, where its
    gradients are reduced to shards and freed, too. While one unit computes the next is on its way.
    What belongs to no unit (embeddings, the last norm) is whole from the forward's begin to the
    backward's end. Outside of these the parameters of `module` are empty: see whole().
    Right also with activation checkpointing, of units or of parts of them. All ranks must use the
    same units in the same order.

    units  the modules to gather one by one; by default the blocks of the model (units_of)
    cost   a step sends the units' parameters twice, all others once and all gradients once, (R-1)/R
           of them: 1.5 times what an all-reduce of the gradients does; bytes held: 1/R of
           everything, and two units
    paper  Rajbhandari et al. 2020, ZeRO, P_os+g+p
    lab    06
    """

    def __init__(self, module, units=None, group=None, find_unused=False):
        self.chosen = units
        super().__init__(module, group=group, find_unused=find_unused)
        self.order, self.position = [], 0  # of use in forward, as the last one has shown it
        self.reduced, self.under_way = set(), []  # units in this backward; (bucket, handle)
        for unit in self.units:
            if unit.module is module:
                module.register_forward_pre_hook(lambda *_: unit.end_gather())
            else:
                unit.module.register_forward_pre_hook(functools.partial(self.enter, unit),
                                                      with_kwargs=True)
                unit.module.register_forward_hook(functools.partial(self.leave, unit))
        module.register_forward_pre_hook(self.forward_begins)
        module.register_forward_hook(self.forward_ends)

    def make_buckets(self, trained, cap_bytes):
        self.units = [Unit(module, its, self.group_of)
                      for module, its in units_of(self.module, self.chosen)]
        return [bucket for unit in self.units for bucket in unit.buckets]

    # --- forward --------------------------------------------------------------------------------

    def forward_begins(self, *_):
        self.position = self.position if in_backward() else 0

    def forward_ends(self, *_):
        if not torch.is_grad_enabled() and not in_backward():
            self.free_all()  # no backward will

    def enter(self, unit, module, inputs, kwargs):
        """The unit is whole, the next one is on its way, and its backward will be noticed."""
        unit.end_gather()
        if not in_backward():  # else a checkpoint runs the forward once more
            if self.order[self.position : self.position + 1] != [unit]:
                self.order[self.position :] = [unit]
            self.position += 1
            self.prefetch(self.position)
        done = functools.partial(self.backward_done, unit)
        return call_after_backward(done, (inputs, kwargs))

    def leave(self, unit, module, inputs, outputs):
        """The unit is freed, and is whole again when its backward begins."""
        if in_backward():
            return
        again = functools.partial(self.backward_of, unit, self.position - 1)
        for output in tree_leaves(outputs):
            if isinstance(output, torch.Tensor) and output.requires_grad:
                output.register_hook(again)
        unit.free()

    def prefetch(self, position):
        if 0 <= position < len(self.order):
            self.order[position].begin_gather()

    # --- backward -------------------------------------------------------------------------------

    def backward_begins(self, _=None):
        if not self.in_backward:  # with sync=False, too: units must be freed
            self.in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self.backward_ends)

    def backward_of(self, unit, position, _):
        self.backward_begins()
        unit.end_gather()
        self.prefetch(position - 1)

    def backward_done(self, unit):
        """The unit's gradients are on their way to their owners, and the unit is free."""
        if self.sync:
            self.reduce(unit)
        unit.free()

    def reduce(self, unit):
        self.reduced.add(unit)
        for bucket in unit.trained():
            bucket.gather()
            self.settle()  # so two units' gradients are whole at most
            bucket.flat /= dist.get_world_size(bucket.group)
            arriving = torch.empty_like(bucket.shard)
            work = dist.reduce_scatter_single(arriving, bucket.flat, group=bucket.group,
                                              async_op=True)
            self.under_way.append((bucket, arriving, work))

    def settle(self):
        """What was on its way has arrived, and the whole gradients are freed."""
        for bucket, arriving, work in self.under_way:
            work.wait()
            bucket.own = arriving if bucket.own is None else bucket.own + arriving
            bucket.drop_gradients()
        self.under_way = []

    def finish(self):
        """The optimizer has its gradients, and no unit is whole; called at the end of backward."""
        self.free_all()
        if not self.sync:
            return
        for unit in reversed(self.units):
            if unit not in self.reduced:
                self.reduce(unit)
        self.settle()
        self.reduced.clear()
        trained = [bucket for bucket in self.buckets if bucket.trained]
        missing = [p for bucket in trained for p in bucket.parameters if p not in bucket.used]
        used = self.used_anywhere() if self.find_unused else ()
        for bucket in trained:
            bucket.hand_over(used)
        if missing and not self.find_unused:
            raise self.no_gradient(missing)

    # --- between the steps ----------------------------------------------------------------------

    def step_ends(self):
        """The next gather sends what was stepped."""
        for bucket in self.buckets:
            bucket.update_shard()

    def free_all(self):
        for unit in self.units:
            unit.free()

    @contextlib.contextmanager
    def whole(self):
        """Inside, `module` has all its parameters, on every rank; what is written there stays."""
        for unit in self.units:
            unit.end_gather()
        try:
            yield
        finally:
            for bucket in self.buckets:
                bucket.take_shard()
            self.free_all()

    def state_dict(self, *args, **kwargs):
        """That of the plain module, whole and copied, on every rank."""
        with self.whole():
            state = super().state_dict(*args, **kwargs)
            return {name: value.clone() for name, value in state.items()}

    def load_state_dict(self, *args, **kwargs):
        with self.whole():
            result = self.module.load_state_dict(*args, **kwargs)
        for bucket in self.buckets:
            bucket.update_master()
        return result


def in_backward():
    return torch._C._current_graph_task_id() != -1
