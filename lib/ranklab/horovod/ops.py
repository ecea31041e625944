"""The collectives that a script calls. All end in one request to the background thread.

A function with `async` in its name returns a handle at once, for poll() and synchronize(). A
trailing underscore means that the tensor itself is changed. Tensors are matched by name; those
without one are numbered, so all ranks must ask for them in the same order.
"""

import torch

from ranklab.horovod.compression import Compression
from ranklab.horovod.requests import OPS, Adasum, Average, Handle, Request, Sum
from ranklab.horovod.world import background


def allreduce_async_(tensor, average=None, name=None, op=None, prescale_factor=1.0,
                     postscale_factor=1.0):
    """A handle: `tensor` will hold the average (or what `op` says) over the ranks."""
    return _reduce([tensor], [tensor], name, _op(op, average), prescale_factor, postscale_factor)[0]


def allreduce_async(tensor, average=None, name=None, op=None, prescale_factor=1.0,
                    postscale_factor=1.0):
    """A handle, whose result is the average (or what `op` says) over the ranks of `tensor`."""
    return _reduce([tensor], [_like(tensor)], name, _op(op, average), prescale_factor,
                   postscale_factor)[0]


def allreduce_(tensor, average=None, name=None, op=None, prescale_factor=1.0,
               postscale_factor=1.0):
    """`tensor` holds the average (or what `op` says) over the ranks; it is returned, too."""
    synchronize(allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor))
    return tensor


def allreduce(tensor, average=None, name=None, compression=Compression.none, op=None,
              prescale_factor=1.0, postscale_factor=1.0):
    """The average (or what `op` says) over the ranks; gradients flow back through it."""
    small, ctx = compression.compress(tensor)
    reduced = _Allreduce.apply(small, name, _op(op, average), prescale_factor, postscale_factor)
    return compression.decompress(reduced, ctx)


def grouped_allreduce_async(tensors, average=None, name=None, op=None, prescale_factor=1.0,
                            postscale_factor=1.0):
    """One handle for all: the tensors become ready together, and are fused if they fit."""
    outputs = [_like(tensor) for tensor in tensors]
    return _reduce(tensors, outputs, name, _op(op, average), prescale_factor, postscale_factor)


def grouped_allreduce(tensors, average=None, name=None, compression=Compression.none, op=None,
                      prescale_factor=1.0, postscale_factor=1.0):
    """The averages (or what `op` says) of several tensors, in the fewest all-reduces."""
    small, ctxs = zip(*map(compression.compress, tensors))
    handles = grouped_allreduce_async(small, average, name, op, prescale_factor, postscale_factor)
    return [compression.decompress(one, ctx) for one, ctx in zip(synchronize(handles), ctxs)]


def allgather_async(tensor, name=None):
    """A handle, whose result is the ranks' tensors one after the other."""
    if tensor.dim() == 0:
        raise ValueError("allgather puts tensors one after the other, and this one has no "
                         "dimension: give it x.view(1)")
    return _submit("allgather", [tensor], [None], name)[0]


def allgather(tensor, name=None):
    """The ranks' tensors one after the other; their first dimension may differ."""
    return synchronize(allgather_async(tensor, name))


def broadcast_async_(tensor, root_rank, name=None):
    """A handle: `tensor` will hold rank root_rank's."""
    return _broadcast(tensor, tensor, root_rank, name)


def broadcast_async(tensor, root_rank, name=None):
    """A handle, whose result is rank root_rank's tensor."""
    return _broadcast(tensor, _like(tensor), root_rank, name)


def broadcast_(tensor, root_rank, name=None):
    """`tensor` holds rank root_rank's; it is returned, too."""
    synchronize(broadcast_async_(tensor, root_rank, name))
    return tensor


def broadcast(tensor, root_rank, name=None):
    """Rank root_rank's tensor."""
    return synchronize(broadcast_async(tensor, root_rank, name))


def barrier():
    """All ranks have come here."""
    synchronize(_submit("barrier", [None], [None], None)[0])


def poll(handle):
    """True when synchronize(handle) would not wait."""
    return all(one.finished.is_set() for one in _all(handle))


def synchronize(handle):
    """The result of `handle`, when it is there.

    error  HorovodInternalError: the ranks disagree about the tensor (Mismatch), some ranks never
           asked for it (stall_shutdown), or Horovod was shut down
    """
    for one in _all(handle):
        # Not for ever: the thread has a limit for each tensor and for each message, and finishes
        # every handle before it ends.
        one.finished.wait()
        if one.error:
            raise type(one.error)(str(one.error))
        if one.output is not None and one.output.is_cuda:
            # An allgather's comes from the memory of the thread's stream, which must not give it
            # away while kernels of the caller's stream still read it.
            one.output.record_stream(torch.cuda.current_stream(one.output.device))
    return [one.output for one in handle] if isinstance(handle, list) else handle.output


def _all(handle):
    return handle if isinstance(handle, list) else [handle]


class _Allreduce(torch.autograd.Function):
    """The sum of gradients is the gradient of the sum: backward is the same all-reduce."""

    @staticmethod
    def forward(ctx, tensor, name, op, prescale, postscale):
        ctx.how = op, prescale, postscale
        handle, = _reduce([tensor], [_like(tensor)], name, *ctx.how)
        return synchronize(handle)

    @staticmethod
    def backward(ctx, gradient):
        handle, = _reduce([gradient], [_like(gradient)], None, *ctx.how)
        return synchronize(handle), None, None, None, None


def _op(op, average):
    if op is not None and average is not None:
        raise ValueError("average=... is the old way to say op=...: give one of them")
    if op is None:
        op = Sum if average is False else Average
    if op not in range(len(OPS)):
        raise ValueError(f"op={op} is not one of {', '.join('hvd.' + name for name in OPS)}")
    return op


def _reduce(tensors, outputs, name, op, prescale, postscale):
    ranks = background().ranks
    if op == Adasum and ranks & (ranks - 1):
        raise ValueError(f"Adasum combines ranks in pairs: {ranks} is not a power of two")
    return _submit("allreduce", tensors, outputs, name, op=OPS[op],
                   prescale=float(prescale), postscale=float(postscale))


def _broadcast(tensor, output, root_rank, name):
    ranks = background().ranks
    if root_rank not in range(ranks):
        raise ValueError(f"root_rank={root_rank} is not one of the {ranks} ranks")
    return _submit("broadcast", [tensor], [output], name, root=root_rank)[0]


def _submit(kind, tensors, outputs, name, **how):
    """The handles, one for each tensor; the background thread has all of them."""
    thread = background()
    name, handles = thread.next_name() if name is None else name, []
    for i, (tensor, output) in enumerate(zip(tensors, outputs)):
        about, own = {}, None
        if tensor is not None:
            _check(tensor)
            own = tensor.detach()  # the thread's work is not part of anybody's graph
            about = {"shape": tuple(tensor.shape), "dtype": tensor.dtype,
                     "device": tensor.device.type}
        full = f"{name}.{i}" if len(tensors) > 1 else name
        request = Request(full, kind, **about, **how)
        handles.append(Handle(request, own, own if output is tensor else output))
    thread.submit(*handles)
    return handles


def _check(tensor):
    if tensor.is_sparse:
        raise ValueError("a sparse tensor can't be sent here: give it x.to_dense()")


def _like(tensor):
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
