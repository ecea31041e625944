"""What a rank sends in collectives: which tensors, whether it has waited, and how many bytes."""

import torch.distributed as dist

from ranklab.checks.beside import expect
from ranklab.checks.handles import HeldWork


class Sent:
    """Inside `with`, notes the tensors of every dist.<verb>, and a HeldWork for those under way.

    note    is called with each tensor and its HeldWork, or None
    waited  is called when somebody waits for one of them
    """

    def __init__(self, verb="all_reduce", note=lambda *_: None, waited=lambda: None):
        self.verb, self.note, self.waited, self.tensors, self.handles = verb, note, waited, [], []

    def __enter__(self):
        self.collective = getattr(dist, self.verb)
        setattr(dist, self.verb, self._call)
        return self

    def __exit__(self, *_):
        setattr(dist, self.verb, self.collective)

    def _call(self, tensor, *args, **kwargs):
        held = None
        if kwargs.get("async_op", args[2] if len(args) > 2 else False):
            result = tensor.detach().clone()  # keeps the strides
            work = self.collective(result, *args, **kwargs)
            held = HeldWork(work, tensor, result, self.waited)
            self.handles.append(held)
        else:
            self.collective(tensor, *args, **kwargs)
        self.tensors.append(tensor)
        self.note(tensor, held)
        return held

    def all_ended(self, where):
        """A Mistake where a function returned before its messages arrived, or wrote into one."""
        missing = sum(not work.is_here for work in self.handles)
        expect(not missing, f"{where}: nobody has waited for {missing} of its {len(self.handles)} "
               f"{self.verb}s", "A message may be half done until its wait() returns: launch all "
               "that is left, then wait() for every handle, not only for the last.")
        divided = sum(work.is_divided for work in self.handles)
        expect(not divided, f"{where}: {divided} tensors were divided while they travelled",
               "Until wait() returns the message is read and written: divide before it is sent.")


def all_sent_once(where, traffic, model, tensors, verb):
    """A Mistake unless all `tensors` travelled once, by `verb`, in a call each or fewer."""
    sent, tied = sum(op.payload_bytes for op in traffic.ops), model.first.weight.nbytes
    wanted, calls = sum(tensor.nbytes for tensor in tensors), dict(traffic.calls)
    hint = f"One {verb} of each, whole, is all that is needed."
    if sent < wanted:
        hint = "Each travels in its own type: in float32 a double loses digits."
    if sent == wanted + tied:
        hint = ("The tied weight travels twice: model.parameters() lists it once; state_dict(), "
                "named_parameters(remove_duplicate=False) and a walk over the modules do not.")
    expect(sent == wanted and {*calls} <= {verb} and calls.get(verb, 0) <= len(tensors),
           f"{where} puts {sent:,} bytes into {calls}; {wanted:,} bytes in {len(tensors)} calls of "
           f"{verb} are enough", hint)
