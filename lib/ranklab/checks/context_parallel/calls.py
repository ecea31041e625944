"""A check's observations of one call: results by name, messages, whether it was refused."""

from collections.abc import Iterable
from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist

from ranklab.checks.handles import Waits
from ranklab.checks.prover import AtMost, Must
from ranklab.meter import Traffic

MESSAGES = {"send", "recv"}
COST = ("handles that nobody waited for", "what it uses of the backend's collectives",
        "messages sent", "bytes sent")


def named(result, *names):
    """Return {name: value} of as many results as names, and a description of what is returned."""
    if isinstance(result, Iterable) and not isinstance(result, torch.Tensor):
        result = tuple(result)
    if isinstance(result, tuple) and len(result) == len(names):
        return {"what is returned": f"({', '.join(names)})", **dict(zip(names, result))}
    return {"what is returned": f"a {type(result).__name__}"}


def afterwards(name):
    """Return the name of an argument's value after the call."""
    return f"the argument `{name}` afterwards"


def changes_of(names, arguments):
    """Return the arguments as they are after the call."""
    return {afterwards(name): argument for name, argument in zip(names, arguments)}


@contextmanager
def messages():
    """Yield the Traffic and the Waits of the block. Messages still in transit are waited for at its
    end: otherwise later ones would land in the wrong place, or never.
    """
    begin, ops, works = dist.batch_isend_irecv, [], []

    def noting(batch):
        ops.extend(batch)  # they hold the tensors, which nobody frees meanwhile
        works.extend(begun := begin(batch))
        return begun

    with Traffic() as traffic, Waits() as waits, mock.patch.object(
            dist, "batch_isend_irecv", noting):
        yield traffic, waits
    for work in works:
        if not waits.is_over(work):
            work.wait()


def cost_of(traffic, waits, messages, nbytes):
    """Return the point-to-point messages of one rank, compared with what is enough."""
    return dict(zip(COST, (
        AtMost(waits.missing(traffic.calls.total()), 0, "leaves {:.0f} of its calls without a "
               "wait()"),
        Must(sorted({*traffic.calls} - MESSAGES), []),
        AtMost(traffic.sent_messages, messages, "sends {:.0f} messages; {:.0f} are enough"),
        AtMost(traffic.sent_bytes, nbytes, "sends {:,.0f} bytes; {:,.0f} are enough"))))
