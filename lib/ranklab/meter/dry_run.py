"""A dry run: one process poses as rank 0 of many, and runs the real code at full size.

Its messages go nowhere, and its tensors have a shape but no memory. So the bytes that it holds and
sends are counted, not computed by a formula.
"""

import contextlib

import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode


@contextlib.contextmanager
def posing(ranks):
    """Make this process pose as rank 0 of `ranks` ranks inside the block; no other rank exists.

    After the block there is no process group.
    Yields: an ExitStack; enter `without_memory()` on it for tensors without memory.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=ranks)
    try:
        with contextlib.ExitStack() as stack:
            yield stack
    finally:
        dist.destroy_process_group()


def without_memory():
    """Return a context in which new tensors have a shape but no memory."""
    return FakeTensorMode(allow_non_fake_inputs=True)
