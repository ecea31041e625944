"""A slow network on one machine: a DDP hook that delays each bucket by its time on a slow link.

It is an emulation, not a simulation: real gradients go through a real all-reduce, and only the
waiting time is added, by the ring formula of ranklab.collectives. A separate thread sleeps for one
bucket after the other, as on one cable, so backward goes on meanwhile and hides what it can.

    link = SlowLink(bandwidth=10e6)
    model.register_comm_hook(link, SlowLink.hook)
    ...
    link.close()
"""

import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from ranklab.collectives import bus_factor
from ranklab.meter import mark


class SlowLink:
    """A DDP hook: average over ranks through a link of `bandwidth` bytes a second.

    CPU only: on a GPU the thread would have to follow the streams of the bucket.

    Cost: one all-reduce a bucket, slower by 2(R-1)/R * bytes / bandwidth seconds.
    Raises: ValueError for a bandwidth that is not positive.
    """

    def __init__(self, bandwidth, group=None):
        if bandwidth <= 0:
            raise ValueError(f"bandwidth={bandwidth} bytes/s must be above 0")
        self.bandwidth, self.group = bandwidth, group
        self.cable = ThreadPoolExecutor(1)  # one worker: buckets go in the order of their hooks

    def hook(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start averaging the bucket over ranks; return the future of the mean."""
        buffer, future = bucket.buffer(), torch.futures.Future()
        self.cable.submit(self._send, buffer, future)
        return future

    def close(self):
        """Wait until all buckets in flight have arrived, and end the thread."""
        self.cable.shutdown()

    def _send(self, buffer, future):
        R = dist.get_world_size(self.group)
        try:
            with mark("communication"):
                time.sleep(bus_factor("all_reduce", R) * buffer.nbytes / self.bandwidth)
                dist.all_reduce(buffer.div_(R), group=self.group)
        except Exception as error:  # else backward would never end
            future.set_exception(error)
        else:
            future.set_result(buffer)
