"""Call a method when a backward ends; and begin the next one clean after one that raised."""

import contextlib

import torch


def in_backward():
    """Return True inside a backward, where a checkpoint runs forwards once more."""
    return torch._C._current_graph_task_id() != -1


class EndOfBackward:
    """Call finish(), a method of the subclass, when all of a backward is done."""

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
    """Return True when the last backward raised, so that it did not come to its end."""
    return replica.in_backward and not in_backward()


def end_failed_backward(replica):
    """Send what a failed backward left unsent, and drop its gradients.

    Recovered: messages. Buckets on their way can't be called back, and other ranks may have
    sent more of them or fewer; so all send the rest, and the next backward meets the next.
    Not recovered: the step. A rank that did not fail has a mean with parts missing, and may
    have stepped by it: after an error that one rank alone can have, all must skip that step.
    """
    replica.in_backward = False
    with contextlib.suppress(ValueError):  # we know that gradients are missing
        replica.finish()
    for bucket in replica.buckets:
        bucket.drop_gradients()  # some were averaged, some were not
