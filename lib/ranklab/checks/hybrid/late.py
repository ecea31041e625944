"""Messages that arrive late, so that a race always shows instead of now and then."""

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from ranklab.checks.handles import Waits

NOT_HERE = 99  # what a buffer holds until its message arrives
SENDS, RECEIVES = ("c10d::send",), ("c10d::recv_", "c10d::recv_any_source_")


class Late(Waits):
    """A context in which, under gloo, a message arrives when this rank waits for it, not before.

    changed  how many tensors were written into while they were being sent
    """

    def __enter__(self):
        super().__enter__()
        self.messages, self.changed, self._mode = [], 0, None
        if dist.get_backend() == "gloo":  # NCCL has one handle for a whole batch
            self._mode = _Messages(self.messages)
            self._mode.__enter__()
        return self

    def __exit__(self, *error):
        if self._mode:
            self._mode.__exit__(*error)
        super().__exit__(*error)

    def _noting(self, method):
        noting = super()._noting(method)

        def arriving(work, *args, **kwargs):
            value = noting(work, *args, **kwargs)
            for message in self.messages if value is not False else ():
                if message.work is work:
                    self.changed += message.arrives()
            return value

        return arriving

    def drop(self):
        """Return how many handles nobody waited for. Their messages end here and never arrive:
        otherwise later ones would land in the wrong place.
        """
        dropped = [message for message in self.messages if not self.is_over(message.work)]
        for message in dropped:
            message.work.wait()
        return len(dropped)


class _Messages(TorchDispatchMode):
    def __init__(self, messages):
        super().__init__()
        self.messages = messages

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if name not in SENDS + RECEIVES:
            return func(*args, **(kwargs or {}))
        (tensor,), *where = args
        message = _Message(tensor, name in RECEIVES)
        handle = func([message.copy], *where)
        message.work = dist.Work.unbox(handle)
        self.messages.append(message)
        return handle


class _Message:
    """A message in transit: a copy is sent instead of the tensor."""

    def __init__(self, tensor, is_received):
        self.tensor, self.is_received, self.is_over = tensor.detach(), is_received, False
        self.copy = self.tensor.clone()
        if is_received:
            self.tensor.fill_(NOT_HERE)

    def arrives(self):
        """Return whether the tensor changed while it was sent to another rank."""
        is_first, self.is_over = not self.is_over, True
        if is_first and self.is_received:
            self.tensor.copy_(self.copy)
        return is_first and not self.is_received and not torch.equal(self.tensor, self.copy)
