"""Tensor fusion: many small all-reduces become a few large ones; the Executor runs them.

A message costs its latency however small it is, and a ring pays that 2(R-1) times. So tensors that
are ready at the same time are copied into one buffer, reduced together, and copied back.
"""

from contextlib import contextmanager, nullcontext
from functools import partial

import torch
import torch.distributed as dist

from ranklab.basics.flat import as_bytes, pack, unpack
from ranklab.horovod.adaptive_sum import adasum

REDUCE = {"Average": dist.ReduceOp.SUM, "Sum": dist.ReduceOp.SUM, "Min": dist.ReduceOp.MIN,
          "Max": dist.ReduceOp.MAX, "Product": dist.ReduceOp.PRODUCT}


def fuse_tensors(tensors, threshold):
    """Plan which tensors share one all-reduce: return lists of positions in `tensors`.

    The lists may come in any order; each keeps the order of `tensors`. Each has one dtype on one
    device, and at most `threshold` bytes unless it is a single tensor. A tensor joins the newest
    list of its dtype and device, or begins a new one.

    Cost: nothing is sent or copied: this is only the plan.
    Raises: ValueError for a negative threshold.
    Lab: 05
    """
    if threshold < 0:
        raise ValueError(f"threshold={threshold} must not be negative")
    groups, last = [], {}  # last: (dtype, device) -> [positions, bytes] of its newest list
    for i, tensor in enumerate(tensors):
        kind = tensor.dtype, tensor.device
        if kind not in last or last[kind][1] + tensor.nbytes > threshold:
            last[kind] = [[], 0]
            groups.append(last[kind][0])
        last[kind][0].append(i)
        last[kind][1] += tensor.nbytes
    return groups


class Executor:
    """Run the handles' collectives over `group`, in the background thread; record the phases."""

    def __init__(self, threshold, group, recorder, device):
        self.threshold, self.group, self.recorder, self.device = threshold, group, recorder, device
        self.streams = {}

    def run(self, handles, known):
        """Run the collectives in the same order on all ranks; after each, yield its handles.

        `known` is the time at which the ranks agreed on the handles.
        """
        for batch in self._batches(handles):
            names, kind = [handle.request.name for handle in batch], batch[0].request.kind
            self._note(names, "QUEUE", known)
            with self._after_computing(batch), self._writable(batch):
                getattr(self, f"_{kind}")(batch)
            self._note(names, kind.upper(), known)
            yield batch

    def _batches(self, handles):
        """Yield lists of handles; each list is served by one collective."""
        alike = {}
        for handle in handles:
            one = handle.request
            is_sum = one.kind == "allreduce"
            key = (one.op, one.prescale, one.postscale) if is_sum else one.name
            alike.setdefault(key, []).append(handle)
        for same in alike.values():
            if same[0].request.kind != "allreduce":
                yield same
                continue
            for positions in fuse_tensors([handle.tensor for handle in same], self.threshold):
                yield [same[i] for i in positions]

    def _note(self, names, phase, since):
        for name in names:
            self.recorder.note(name, phase, since)

    @contextmanager
    def _after_computing(self, handles):
        """On a GPU, run the block on a separate stream, after the kernels that made the tensors."""
        first = handles[0].tensor
        device = self.device if first is None else first.device
        if device.type != "cuda":
            yield
            return
        if device not in self.streams:
            self.streams[device] = torch.cuda.Stream(device)
        stream = self.streams[device]
        with torch.cuda.stream(stream):
            for handle in handles:
                if handle.computed:
                    stream.wait_event(handle.computed)
            yield
        stream.synchronize()  # a finished handle's output may be read anywhere

    @staticmethod
    def _writable(handles):
        """Enter torch.inference_mode() for inference tensors, which can be changed only there."""
        is_inference = any(handle.tensor is not None and handle.tensor.is_inference()
                           for handle in handles)
        return torch.inference_mode() if is_inference else nullcontext()

    def _allreduce(self, handles):
        request, group = handles[0].request, self.group
        names, tensors = zip(*((handle.request.name, handle.tensor) for handle in handles))
        stream = torch.cuda.current_stream(tensors[0].device) if tensors[0].is_cuda else None
        phase = partial(self.recorder.phase, names, stream=stream)
        flat = tensors[0]
        is_fused = len(tensors) > 1 or not flat.is_contiguous()
        if is_fused:
            with phase("MEMCPY_IN_FUSION_BUFFER"):
                flat = pack(tensors)
        scale(flat, request.prescale)
        with phase(f"{'NCCL' if stream else 'GLOO'}_ALLREDUCE"):
            if request.op == "Adasum":
                flat.copy_(adasum(flat, [tensor.numel() for tensor in tensors], group))
            else:
                dist.all_reduce(flat, REDUCE[request.op], group=group)
        ranks = dist.get_world_size(group) if request.op == "Average" else 1
        scale(flat, request.postscale / ranks)
        if is_fused:
            with phase("MEMCPY_OUT_FUSION_BUFFER"):
                unpack(flat, tensors)

    def _allgather(self, handles):
        """Gather the rows of all ranks; shorter tensors are padded to the longest."""
        handle, = handles
        rows, tensor = handle.rows, handle.tensor
        longest = tensor.new_zeros(max(rows), *tensor.shape[1:])
        longest[: len(tensor)] = tensor
        out = tensor.new_empty(len(rows) * max(rows), *tensor.shape[1:])
        dist.all_gather_single(as_bytes(out), as_bytes(longest), group=self.group)
        handle.output = torch.cat([part[:n] for part, n in zip(out.chunk(len(rows)), rows)]
                                  if max(rows) else [out])

    def _broadcast(self, handles):
        handle, = handles
        whole = handle.tensor.resolve_conj().resolve_neg().contiguous()
        dist.broadcast(as_bytes(whole), handle.request.root, group=self.group)
        if whole is not handle.tensor:
            handle.tensor.copy_(whole)

    def _barrier(self, handles):
        pass  # it was agreed on: so all ranks are here


def scale(x, factor):
    """Multiply `x` by `factor`, in place; round whole numbers towards zero, as in Horovod."""
    if factor == 1:
        return
    if x.is_floating_point() or x.is_complex():
        x.mul_(factor)
    else:
        x.copy_(x.double().mul_(factor))
