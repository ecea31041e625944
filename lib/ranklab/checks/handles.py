"""Handles that nobody waited for: a result may be right all the same, by chance."""

import torch
import torch.distributed as dist

from ranklab.checks.exercise import Mistake

DROPPED = ("isend and irecv return a handle, but nothing waits for it here. If you drop the "
           "handle, the message can be lost. Keep the handle, then call its wait().")


class Waits:
    """A context that notes which handles of this rank are waited for, under whatever call.

    Whoever takes a handle's future is believed to wait for that.
    """

    def __enter__(self):
        self._over = []  # the handles themselves: no later one gets the id of one that is kept
        self._methods = {name: getattr(dist.Work, name)
                         for name in ("wait", "synchronize", "is_completed", "get_future")}
        for name, method in self._methods.items():
            setattr(dist.Work, name, self._noting(method))
        return self

    def __exit__(self, *_):
        for name, method in self._methods.items():
            setattr(dist.Work, name, method)

    def _noting(self, method):
        def noting(work, *args, **kwargs):
            value = method(work, *args, **kwargs)
            if value is not False:  # is_completed() may say: not yet
                self._over.append(work)
            return value

        return noting

    def is_over(self, work):
        """Return whether somebody has waited for this handle."""
        return any(work is over for over in self._over)

    def missing(self, calls):
        """Count the handles of `calls` that were not waited for.

        NCCL has one handle for a whole batch, so the count is 0 there.
        """
        if dist.get_backend() != "gloo":
            return 0
        return calls - len({id(work) for work in self._over})

    def forget(self):
        """Drop the handles, so that what they hold is freed."""
        self._over.clear()


class HeldWork:
    """A collective under way, whose result arrives when somebody waits for it, and not before.

    What a race would show now and then is thus seen always: a handle that nobody waits for leaves
    the tensor as it was, and what is written into it meanwhile is lost.
    """

    def __init__(self, work, tensor, result, waited=lambda: None):
        self.work, self.tensor, self.result, self.waited = work, tensor, result, waited
        self.given = tensor.detach().clone()
        self.is_here = self.is_divided = False  # is_divided: while under way

    def wait(self, *timeout):
        self.waited()
        return self._arrives(self.work.wait(*timeout))

    def is_completed(self):
        if not self.work.is_completed():
            return False
        self.waited()
        return self._arrives(True)

    def get_future(self):
        # It arrives in a thread of torch's, for which nobody need wait.
        return self.work.get_future().then(lambda done: self._arrives([self.tensor]))

    def _arrives(self, value):
        if not self.is_here:
            self.is_here = True
            self.is_divided = bool(self.given.any()) and any(
                torch.allclose(ranks * self.tensor, self.given) for ranks in range(2, 5))
            self.tensor.detach().copy_(self.result)
        return value

    def __getattr__(self, name):
        return getattr(self.work, name)


def all_awaited(missing, where):
    """Raise a Mistake where a rank returned before all that it had begun was done."""
    if missing > 0:
        raise Mistake(f"{where}: {missing} of its calls {'was' if missing == 1 else 'were'} never "
                      "waited for", "isend, irecv and async_op=True return a handle. Keep the "
                      "handle of each, and wait for all of them. Until then you may not read or "
                      "reuse a buffer, and what looks right is right by chance.")
