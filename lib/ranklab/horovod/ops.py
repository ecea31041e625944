"""The collectives that a script calls. All end in one request to the background thread.

A function with `async` in its name returns a handle at once, for poll() and synchronize(). A
trailing underscore means that the tensor itself is changed. Tensors are matched by name; those
without one are numbered, so all ranks must ask for them in the same order. Gradients flow back
through allreduce alone.
"""

import torch

from ranklab.horovod.compression import Compression
from ranklab.horovod.negotiation import OPS, Adasum, Average, Handle, Request
from ranklab.horovod.world import background


def allreduce_async_(tensor, average=None, name=None, op=Average, prescale_factor=1.0,
                     postscale_factor=1.0):
    """A handle: `tensor` will hold the average (or what `op` says) over the ranks.

    It is multiplied by prescale_factor before, and by postscale_factor after.
    """
    return _reduce([tensor], average, name, op, prescale_factor, postscale_factor)[0]


def allreduce_async(tensor, *args, **options):
    """A handle, whose result is the average; options as for allreduce_async_."""
    return allreduce_async_(tensor.detach().clone(), *args, **options)


def allreduce_(tensor, *args, **options):
    """`tensor` holds the average, and is returned; options as for allreduce_async_."""
    synchronize(allreduce_async_(tensor, *args, **options))
    return tensor


def allreduce(tensor, average=None, name=None, compression=Compression.none, op=Average,
              prescale_factor=1.0, postscale_factor=1.0):
    """The average over the ranks, through which gradients flow; options as for allreduce_async_."""
    small, ctx = compression.compress(tensor)
    reduced = _Allreduce.apply(small, average, name, op, prescale_factor, postscale_factor)
    return compression.decompress(reduced, ctx)


class _Allreduce(torch.autograd.Function):
    """Backward is the same all-reduce; as in Horovod for any `op`, right for Average and Sum."""

    @staticmethod
    def forward(ctx, tensor, average, name, *op_and_factors):
        ctx.op_and_factors = op_and_factors
        return synchronize(allreduce_async(tensor, average, name, *op_and_factors))

    @staticmethod
    def backward(ctx, gradient):
        reduced = synchronize(allreduce_async(gradient, None, None, *ctx.op_and_factors))
        return reduced, None, None, None, None, None


def grouped_allreduce(tensors, average=None, name=None, compression=Compression.none, op=Average,
                      prescale_factor=1.0, postscale_factor=1.0):
    """The averages of several tensors: they become ready together, and are fused if they fit."""
    small, ctxs = zip(*(compression.compress(tensor.detach()) for tensor in tensors))
    handles = _reduce([each.clone() for each in small], average, name, op, prescale_factor,
                      postscale_factor)
    return [compression.decompress(synchronize(handle), ctx) for handle, ctx in zip(handles, ctxs)]


def allgather(tensor, name=None):
    """The tensors of all ranks, one after the other; their first dimensions may differ."""
    if tensor.dim() == 0:
        raise ValueError("allgather puts tensors one after the other, and this one has no "
                         "dimension: give it x.view(1)")
    return synchronize(_submit("allgather", [tensor], name)[0])


def broadcast_async_(tensor, root_rank, name=None):
    """A handle: `tensor` will hold rank root_rank's."""
    ranks = background().ranks
    if root_rank not in range(ranks):
        raise ValueError(f"root_rank={root_rank} is not one of the {ranks} ranks")
    return _submit("broadcast", [tensor], name, root=root_rank)[0]


def broadcast_(tensor, root_rank, name=None):
    """`tensor` holds rank root_rank's, and is returned."""
    synchronize(broadcast_async_(tensor, root_rank, name))
    return tensor


def broadcast(tensor, root_rank, name=None):
    """Rank root_rank's tensor."""
    return broadcast_(tensor.detach().clone(), root_rank, name)


def barrier():
    """All ranks have reached this call."""
    synchronize(_submit("barrier", [None], None)[0])


def poll(handle):
    """True when synchronize(handle) would not wait."""
    return handle.finished.is_set()


def synchronize(handle):
    """The result of `handle`, when it is there.

    error  HorovodInternalError: the ranks disagree about the tensor (Mismatch), some ranks never
           asked for it (stall_shutdown), or Horovod was shut down
    """
    # This wait ends: the thread has a limit for each tensor and for each message, and finishes
    # every handle before it ends.
    handle.finished.wait()
    if handle.error:
        raise type(handle.error)(str(handle.error))
    if handle.output is not None and handle.output.is_cuda:
        # An allgather's comes from the memory of the thread's stream, which must not give it away
        # while kernels of the caller's stream still read it.
        handle.output.record_stream(torch.cuda.current_stream(handle.output.device))
    return handle.output


def _reduce(tensors, average, name, op, prescale, postscale):
    ranks = background().ranks
    if average is not None:
        raise ValueError(f"average={average} is the old way to say op=...: give op=hvd.Average or "
                         "op=hvd.Sum")
    if op not in range(len(OPS)):
        raise ValueError(f"op={op} is not one of {', '.join('hvd.' + name for name in OPS)}")
    if op == Adasum and ranks & (ranks - 1):
        raise ValueError(f"Adasum combines ranks in pairs: {ranks} is not a power of two")
    return _submit("allreduce", tensors, name, op=OPS[op], prescale=float(prescale),
                   postscale=float(postscale))


def _submit(kind, tensors, name, **how):
    """The handles, one for each tensor; the background thread has all of them."""
    thread = background()
    name, handles = thread.next_name() if name is None else name, []
    for i, tensor in enumerate(tensors):
        about = {} if tensor is None else {
            "shape": tuple(tensor.shape), "dtype": tensor.dtype, "device": tensor.device.type}
        full = f"{name}.{i}" if len(tensors) > 1 else name
        handles.append(Handle(Request(full, kind, **about, **how), tensor))
    thread.submit(*handles)
    return handles
