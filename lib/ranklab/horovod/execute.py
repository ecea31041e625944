"""What was agreed on becomes collectives. Only the background thread comes here."""

from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from ranklab.flat import unpack
from ranklab.horovod.adaptive_sum import adasum
from ranklab.horovod.fusion import FusionBuffer, fuse_tensors
from ranklab.horovod.requests import Handle, Response

REDUCE = {"Average": dist.ReduceOp.SUM, "Sum": dist.ReduceOp.SUM, "Min": dist.ReduceOp.MIN,
          "Max": dist.ReduceOp.MAX, "Product": dist.ReduceOp.PRODUCT}


class Job(NamedTuple):
    """One response on this rank."""

    response: Response
    handle: Handle

    @property
    def tensor(self):
        return self.handle.tensor


class Executor:
    """Runs responses over `group`, and notes their phases."""

    def __init__(self, threshold, group, recorder, device):
        self.threshold, self.group, self.recorder, self.device = threshold, group, recorder, device
        self.buffer = FusionBuffer()
        self.streams = {}

    def run(self, responses, handles, known):
        """Yields the jobs of each collective when it is done; the order is that of all ranks.

        `handles` are this rank's, by name. `known` is when the responses were agreed on.
        """
        jobs = [Job(response, handles[response.request.name]) for response in responses]
        for batch in self._batches(jobs):
            names = [job.response.request.name for job in batch]
            kind = batch[0].response.request.kind
            self._note(names, "QUEUE", known)
            with self._after_computing(batch):
                getattr(self, f"_{kind}")(batch)
            self._note(names, kind.upper(), known)
            yield batch

    def _batches(self, jobs):
        """Lists of jobs that are done in one collective each."""
        alike = {}
        for job in jobs:
            one = job.response.request
            is_sum = one.kind == "allreduce"
            key = (one.op, one.prescale, one.postscale) if is_sum else one.name
            alike.setdefault(key, []).append(job)
        for same in alike.values():
            if same[0].response.request.kind != "allreduce":
                yield same
                continue
            for positions in fuse_tensors([job.tensor for job in same], self.threshold):
                yield [same[i] for i in positions]

    def _note(self, names, phase, since):
        for name in names:
            self.recorder.note(name, phase, since)

    @contextmanager
    def _after_computing(self, jobs):
        """On a GPU: a stream of our own, behind the kernels that made the tensors."""
        device = jobs[0].tensor.device if jobs[0].tensor is not None else self.device
        if device.type != "cuda":
            yield
            return
        if device not in self.streams:
            self.streams[device] = torch.cuda.Stream(device)
        stream = self.streams[device]
        with torch.cuda.stream(stream):
            for job in jobs:
                if job.handle.computed:
                    stream.wait_event(job.handle.computed)
            yield
        stream.synchronize()  # a finished handle's output may be read anywhere

    def _allreduce(self, jobs):
        request, group = jobs[0].response.request, self.group
        names = [job.response.request.name for job in jobs]
        tensors = [job.tensor for job in jobs]
        stream = torch.cuda.current_stream(tensors[0].device) if tensors[0].is_cuda else None
        phase = partial(self.recorder.phase, names, stream=stream)
        flat = tensors[0]
        is_fused = len(jobs) > 1 or not flat.is_contiguous()
        if is_fused:
            with phase("MEMCPY_IN_FUSION_BUFFER"):
                flat = self.buffer.pack(tensors)
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

    def _allgather(self, jobs):
        """Rows of all ranks: the shorter ones travel padded to the longest."""
        (response, handle), = jobs
        rows, tensor = response.sizes, handle.tensor
        longest = tensor.new_zeros(max(rows), *tensor.shape[1:])
        longest[: len(tensor)] = tensor
        out = tensor.new_empty(len(rows) * max(rows), *tensor.shape[1:])
        dist.all_gather_single(out, longest, group=self.group)
        handle.output = torch.cat([part[:n] for part, n in zip(out.chunk(len(rows)), rows)]
                                  if max(rows) else [out])

    def _broadcast(self, jobs):
        (response, handle), = jobs
        whole = handle.tensor.contiguous()
        dist.broadcast(whole, response.request.root, group=self.group)
        if whole is not handle.tensor:
            handle.tensor.copy_(whole)

    def _barrier(self, jobs):
        pass  # it was agreed on: so all ranks are here


def scale(x, factor):
    """`x` is multiplied by `factor`; whole numbers are rounded towards zero, as in Horovod."""
    if factor == 1:
        return
    if x.is_floating_point() or x.is_complex():
        x.mul_(factor)
    else:
        x.copy_(x.double().mul_(factor))
