"""Call a method at the end of a backward, and recover from a backward that raised."""

import contextlib

import torch


def in_backward():
    """Return True inside a backward, where activation checkpointing runs forwards again."""
    return torch._C._current_graph_task_id() != -1


class EndOfBackward:
    """Call finish(), a method of the subclass, when a whole backward is done."""

    in_backward = False

    def await_end_of_backward(self):
        if not self.in_backward:
            self.in_backward = True
            # Autograd calls back at the end of the backward() in which this hook ran: the outer
            # one, even when checkpointing calls backward() again inside.
            torch.autograd.Variable._execution_engine.queue_callback(self.backward_ends)

    def backward_ends(self):
        self.in_backward = False
        self.finish()


def failed_before(replica):
    """Return True if the last backward raised and so did not finish."""
    return replica.in_backward and not in_backward()


def end_failed_backward(replica):
    """Send the buckets that a failed backward left unsent, and drop its gradients.

    Recovered: the order of messages. Buckets on their way can't be called back, and other ranks
    may have sent more or fewer of them; so all ranks send the rest, and the next backward's
    messages match again.
    Not recovered: the step. A rank that did not fail has a mean with parts missing, and may have
    used it: after an error that only one rank can have, all ranks must skip that step.
    """
    replica.in_backward = False
    with contextlib.suppress(ValueError):  # we know that gradients are missing
        replica.finish()
    for bucket in replica.buckets:
        bucket.drop_gradients()  # some were averaged, some were not
