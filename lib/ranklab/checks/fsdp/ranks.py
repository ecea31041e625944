"""What is compared on the ranks themselves, when all of them have communicated."""

import gc

import torch
import torch.distributed as dist

from ranklab.checks.exercise import Mistake
from ranklab.checks.failures import hinted
from ranklab.checks.trial import group_of_mine, members_of, on_ranks
from ranklab.meter.storage import storages_of


def on_all_ranks(comparisons, *args, ranks, failures):
    """All comparisons(*args) hold on that many ranks; else a Mistake, with the hint of `failures`.

    comparisons  a generator of (function, its arguments...); it alone communicates, and the
                 function may raise a Mistake: no other rank waits for this one then
    """
    with hinted(failures):
        for mistake in on_ranks(_first_mistake, comparisons, args, ranks=ranks):
            if mistake:
                raise mistake


def _first_mistake(comparisons, args):
    for compare, *what in list(comparisons(*args)):
        try:
            compare(*what)
        except Mistake as mistake:
            return mistake


def expect(is_so, what, hint):
    """A Mistake unless it is so; `what` says what is seen instead."""
    if not is_so:
        raise Mistake(what, hint)


def world_and_group():
    """On four ranks: (the members, the group) for all of them, and for this rank's of 1 and 3."""
    return (range(4), None), (members_of(dist.get_rank()), group_of_mine())


def held_bytes(besides=()):
    """Bytes of all tensors that anything in this process holds, without those of `besides`."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
    held = {storage._cdata: storage.nbytes() for x in tensors for storage in storages_of(x)}
    known = {storage._cdata for x in besides for storage in storages_of(x)}
    return sum(nbytes for key, nbytes in held.items() if key not in known)


def chunk_of(tensor, ranks, rank):
    """The rank's chunk as torch.chunk cuts; empty where there are fewer chunks than ranks."""
    chunks = tensor.chunk(ranks)
    return chunks[rank] if rank < len(chunks) else tensor[:0]
