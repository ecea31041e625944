"""A dry run: one process poses as rank 0 of many, and runs the real code at full size.

Its messages go nowhere, and its tensors have a shape and no memory. So what it holds and sends is
counted, not computed by a formula.
"""

import contextlib

import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode


@contextlib.contextmanager
def posing(ranks):
    """Make this process pose, inside the block, as rank 0 of this many ranks; no other exists.

    Afterwards it has no group.
    Yields: an ExitStack; let it enter `without_memory()` for tensors without memory.
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
    """Return a context in which new tensors have a shape and no memory."""
    return FakeTensorMode(allow_non_fake_inputs=True)
