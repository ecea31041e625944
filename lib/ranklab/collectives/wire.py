"""How ranks communicate here: one message out and one message in, at the same time."""

import torch.distributed as dist


def sendrecv(piece, to, into, source, group=None):
    """Send `piece` to rank `to`, and receive into `into` from rank `source`; return `into`.

    Cost: one message each way; an empty piece is not sent (the receiver knows its size too).
    Raises: ValueError if `to` or `source` is no rank of the group.
    Lab: 02
    """
    for work in start_sendrecv(piece, to, into, source, group):
        work.wait()
    return into


def start_sendrecv(piece, to, into, source, group=None):
    """Start sendrecv; return a list of works. Do not use the tensors until you have waited for all.

    Cost: the same as sendrecv.
    """
    size = dist.get_world_size(group)
    for peer in (to, source):  # gloo would crash, NCCL would wait
        if not 0 <= peer < size:
            raise ValueError(f"rank {peer} is not one of the {size} ranks 0 to {size - 1}")
    ops = []
    if into.numel():  # the receive is posted first, so that an arriving message has a buffer
        ops.append(dist.P2POp(dist.irecv, into, group=group, group_peer=source))
    if piece.numel():
        ops.append(dist.P2POp(dist.isend, piece, group=group, group_peer=to))
    # One batch: gloo's blocking send waits for its receiver, and NCCL puts the sends and receives
    # between two ranks in one queue. If all ranks sent first, both would wait forever.
    return dist.batch_isend_irecv(ops) if ops else []
