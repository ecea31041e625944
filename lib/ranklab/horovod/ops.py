"""The collectives that a script calls. Each submits requests to the background thread.

A function with `async` in its name returns a handle at once, for poll() and synchronize(). A
trailing underscore means that the tensor itself is changed; neither kind has a gradient. Tensors
are matched by name. Unnamed tensors are numbered, so all ranks must submit them in the same order.

Gradients flow back as in Horovod 0.28.1, in backward() of every rank: through allreduce by the
same all-reduce (right for Average and Sum: the gradient of the sum of the ranks' losses), through
allgather and broadcast by an average (the gradient of the mean of the ranks' losses).

Any type can be gathered or broadcast; allreduce takes the types that both gloo and NCCL can add up.
"""

import torch

from ranklab.horovod.compression import Compression
from ranklab.horovod.negotiation import OPS, Adasum, Average, Handle, Request, Sum
from ranklab.horovod.world import background, rank

REDUCED = (torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16,
           torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)


def allreduce_async_(tensor, average=None, name=None, op=Average, prescale_factor=1.0,
                     postscale_factor=1.0):
    """Start averaging `tensor` over ranks in place (or reducing it by `op`); return a handle.

    It is multiplied by prescale_factor before, and by postscale_factor after the reduction.
    """
    return _reduce([tensor], average, name, op, prescale_factor, postscale_factor)[0]


def allreduce_async(tensor, *args, **options):
    """Return a handle whose result is the average; options as for allreduce_async_."""
    return allreduce_async_(tensor.detach().clone(), *args, **options)


def allreduce_(tensor, *args, **options):
    """Put the average into `tensor`, and return it; options as for allreduce_async_."""
    synchronize(allreduce_async_(tensor, *args, **options))
    return tensor


def allreduce(tensor, *args, **options):
    """Return the average over the ranks; options as for grouped_allreduce.

    The gradient is the same all-reduce of the gradients.
    """
    return grouped_allreduce([tensor], *args, **options)[0]


def grouped_allreduce(tensors, average=None, name=None, compression=Compression.none, op=Average,
                      prescale_factor=1.0, postscale_factor=1.0):
    """Return the averages of several tensors; they are submitted together, and fused if they fit.

    Options as for allreduce_async_, and `compression` on the wire. The gradients are averaged
    (or reduced by `op`) in the same way.
    """
    small, ctxs = zip(*(compression.compress(tensor) for tensor in tensors))
    reduced = _Allreduce.apply((average, name, op, prescale_factor, postscale_factor), *small)
    return [compression.decompress(each, ctx) for each, ctx in zip(reduced, ctxs)]


def grouped_allreduce_(tensors, average=None, name=None, op=Average, prescale_factor=1.0,
                       postscale_factor=1.0):
    """Average several tensors in place, and return them; options as for allreduce_async_."""
    for handle in _reduce(tensors, average, name, op, prescale_factor, postscale_factor):
        synchronize(handle)
    return tensors


class _Allreduce(torch.autograd.Function):
    """Backward is the same all-reduce, as in Horovod for any `op`."""

    @staticmethod
    def forward(ctx, options, *tensors):
        ctx.op_and_factors = options[2:]
        return tuple(grouped_allreduce_([each.detach().clone() for each in tensors], *options))

    @staticmethod
    def backward(ctx, *gradients):
        copies = [gradient.clone() for gradient in gradients]
        return None, *grouped_allreduce_(copies, None, None, *ctx.op_and_factors)


def allgather(tensor, name=None):
    """Concatenate the tensors of all ranks along dim 0; their first dimensions may differ.

    Backward averages the gradient over ranks; each rank takes its own rows of the average.
    """
    return grouped_allgather([tensor], name)[0]


def allgather_async(tensor, name=None):
    """Return a handle whose result is allgather's: the tensors of all ranks, concatenated."""
    return _gather([tensor], name)[0]


def grouped_allgather(tensors, name=None):
    """Gather each of several tensors as allgather does; return the list of results."""
    return list(_Allgather.apply(name, *tensors))


class _Allgather(torch.autograd.Function):
    """Backward averages all rows, as in Horovod, and each rank takes its own."""

    @staticmethod
    def forward(ctx, name, *tensors):
        handles = _gather(tensors, name)
        outputs = tuple(synchronize(handle) for handle in handles)
        ctx.rows = [handle.rows for handle in handles]
        return outputs

    @staticmethod
    def backward(ctx, *gradients):
        averages = grouped_allreduce_([gradient.clone() for gradient in gradients])
        return None, *(average.split(rows)[rank()] for average, rows in zip(averages, ctx.rows))


def broadcast(tensor, root_rank, name=None):
    """Return rank root_rank's tensor.

    On rank root_rank the gradient is the average over ranks; on the others it is zero.
    """
    return _Broadcast.apply(tensor, root_rank, name)


def broadcast_async(tensor, root_rank, name=None):
    """Return a handle whose result is rank root_rank's tensor."""
    return broadcast_async_(tensor.detach().clone(), root_rank, name)


def broadcast_async_(tensor, root_rank, name=None):
    """Start copying rank root_rank's tensor into `tensor`; return a handle."""
    ranks = background().ranks
    if root_rank not in range(ranks):
        raise ValueError(f"root_rank={root_rank} is not one of the {ranks} ranks")
    return _submit("broadcast", [tensor], name, root=root_rank)[0]


def broadcast_(tensor, root_rank, name=None):
    """Copy rank root_rank's tensor into `tensor`, and return it."""
    synchronize(broadcast_async_(tensor, root_rank, name))
    return tensor


class _Broadcast(torch.autograd.Function):
    """Backward averages on all ranks, as in Horovod; only root_rank's input gets the average."""

    @staticmethod
    def forward(ctx, tensor, root_rank, name):
        ctx.root_rank = root_rank
        return synchronize(broadcast_async(tensor, root_rank, name))

    @staticmethod
    def backward(ctx, gradient):
        average = allreduce_(gradient.clone())
        return average if rank() == ctx.root_rank else average.zero_(), None, None


def barrier():
    """Wait until all ranks have reached this call."""
    synchronize(_submit("barrier", [None], None)[0])


def poll(handle):
    """Return True if synchronize(handle) would not wait."""
    return handle.finished.is_set()


def synchronize(handle):
    """Wait for the result of `handle`, and return it.

    Raises: HorovodInternalError if the ranks disagree about the tensor (Mismatch), if some ranks
        never submitted it (stall_shutdown), or if Horovod was shut down.
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
    for tensor in tensors:
        if tensor.dtype not in REDUCED:
            raise ValueError(f"allreduce does not take {tensor.dtype}: give it a wider type, for "
                             "example x.int() or x.float()")
        if tensor.is_complex() and op not in (Average, Sum):
            raise ValueError(f"op=hvd.{OPS[op]} is not built for complex numbers")
    return _submit("allreduce", tensors, name, op=OPS[op], prescale=float(prescale),
                   postscale=float(postscale))


def _gather(tensors, name):
    if any(tensor.dim() == 0 for tensor in tensors):
        raise ValueError("allgather puts tensors one after the other, and this one has no "
                         "dimension: give it x.view(1)")
    return _submit("allgather", tensors, name)


def _submit(kind, tensors, name, **options):
    """Submit the tensors to the background thread; return one handle for each tensor."""
    thread = background()
    for tensor in tensors:
        _refuse(tensor, kind)
    name, handles = thread.next_name() if name is None else name, []
    for i, tensor in enumerate(tensors):
        metadata = {} if tensor is None else {
            "shape": tuple(tensor.shape), "dtype": tensor.dtype, "device": tensor.device.type}
        full = f"{name}.{i}" if len(tensors) > 1 else name
        handles.append(Handle(Request(full, kind, **metadata, **options), tensor))
    thread.submit(*handles)
    return handles


def _refuse(tensor, kind):
    """Raise on the calling rank for a tensor that would end the background thread of every rank."""
    if tensor is None:
        return
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise ValueError("sparse and quantized tensors are not built here: give it x.to_dense() "
                         "or x.dequantize()")
    if kind != "allgather" and any(
            n > 1 and stride == 0 for n, stride in zip(tensor.shape, tensor.stride())):
        raise ValueError("elements of this tensor share memory, as x.expand(...) makes them, so "
                         "it can't hold the result: give it x.clone()")
