"""How ranks talk here: one message out, one message in, at the same time."""

import torch.distributed as dist


def sendrecv(piece, to, into, source, group=None):
    """`piece` has gone to rank `to`, and `into` holds what rank `source` sent; returns `into`.

    cost   one message each way; an empty piece is not sent (the receiver knows its size too)
    error  `to` and `source` must be ranks of the group
    lab    02
    """
    for work in start_sendrecv(piece, to, into, source, group):
        work.wait()
    return into


def start_sendrecv(piece, to, into, source, group=None):
    """sendrecv is under way; leave both tensors alone until you have waited for each work.

    cost   as sendrecv; returns a list of works
    """
    size = dist.get_world_size(group)
    for peer in (to, source):  # gloo would crash, NCCL would wait
        if not 0 <= peer < size:
            raise ValueError(f"rank {peer} is not one of the {size} ranks 0 to {size - 1}")
    ops = []
    if into.numel():  # the receive is posted first, so that no message waits for a place to land
        ops.append(dist.P2POp(dist.irecv, into, group=group, group_peer=source))
    if piece.numel():
        ops.append(dist.P2POp(dist.isend, piece, group=group, group_peer=to))
    # One batch: gloo's blocking send waits for its receiver, and NCCL puts the sends and receives
    # between two ranks in one queue. If all ranks sent first, both would wait forever.
    return dist.batch_isend_irecv(ops) if ops else []
