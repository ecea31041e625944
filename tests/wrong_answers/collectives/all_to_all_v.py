"""Lab 02, all_to_all_v: mistakes that a good student would really make."""

import torch
import torch.distributed as dist
from mutants import mutant

from ranklab.collectives import all_to_all_v, ring_all_gather, sendrecv

NEW = "[pieces[0].new_empty(n) for n in source_lengths]"
TELL = "verbs.all_to_all(lengths, group).flatten().tolist()"
SWAP = "        sendrecv(pieces[to].contiguous(), to, received[source], source, group)\n"
WRONG = [
    mutant(all_to_all_v, "received[rank].copy_(pieces[rank])", "received[rank] = pieces[rank]",
           says="memory of a piece"),
    mutant(all_to_all_v, TELL, "[len(piece) for piece in pieces]",
           says="the lengths have to travel first|has a length of its own"),
    mutant(all_to_all_v, SWAP, SWAP.replace(", group)", ")"), says="Pass `group` on",
           called="pieces_to_all_ranks"),
    mutant(all_to_all_v, ".tolist()", ".to(torch.bfloat16).long().tolist()",
           says="300. must match the size of tensor b .301", called="lengths_in_bfloat16"),
    mutant(all_to_all_v, NEW, NEW.replace("(n)", "(n, dtype=torch.float32)"),
           says="type that the sender gave|longer than the place"),
    mutant(all_to_all_v, TELL, TELL.replace(", group", ""), says="Pass `group` on",
           called="lengths_of_all_ranks"),
    mutant(all_to_all_v, "pieces[to].contiguous()", "pieces[to]",
           says="x is not contiguous, and a message must be"),
    mutant(all_to_all_v, "    return received", "    return received[rank:] + received[:rank]",
           says="Place i of the list must hold"),
    mutant(all_to_all_v, "    return received", "    return [x for x in received if x.numel()]",
           says="even where that is empty"),
    mutant(all_to_all_v, "    return received", "    pieces.clear()\n    return received",
           says="`pieces` have changed"),
]


def all_to_all_v__padded_to_the_longest(pieces, group=None):
    """without padding"""
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    lengths = torch.tensor([len(piece) for piece in pieces], device=pieces[0].device)
    of_all = ring_all_gather(lengths, group).view(R, R)
    longest, received = int(of_all.max()), [pieces[rank].clone()] * R
    for step in range(1, R):
        to, source = (rank + step) % R, (rank - step) % R
        n = int(of_all[source, rank])
        padded = pieces[0].new_zeros(longest if len(pieces[to]) else 0)
        padded[: len(pieces[to])] = pieces[to]
        place = pieces[0].new_empty(longest if n else 0)
        received[source] = sendrecv(padded, to, place, source, group)[:n]
    return received


def all_to_all_v__all_send_first(pieces, group=None):
    """A send waits until its receiver receives"""
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    lengths = torch.tensor([len(piece) for piece in pieces], device=pieces[0].device)
    coming = ring_all_gather(lengths, group).view(R, R)[:, rank].tolist()
    received = [pieces[0].new_empty(n) for n in coming]
    received[rank].copy_(pieces[rank])
    for to in range(R):
        if to != rank and len(pieces[to]):
            dist.send(pieces[to].contiguous(), group=group, group_dst=to)
    for source in range(R):
        if source != rank and len(received[source]):
            dist.recv(received[source], group=group, group_src=source)
    return received


def all_to_all_v__a_message_for_nothing(pieces, group=None):
    """An empty piece is no message"""
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    received = [pieces[rank].clone()] * R
    for step in range(1, R):
        to, source = (rank + step) % R, (rank - step) % R
        n = torch.tensor([len(pieces[to])], device=pieces[to].device)
        coming = torch.empty_like(n)
        sendrecv(n, to, coming, source, group)
        received[source] = pieces[0].new_empty(int(coming))
        works = [dist.irecv(received[source], group=group, group_src=source),
                 dist.isend(pieces[to].contiguous(), group=group, group_dst=to)]
        for work in works:
            work.wait()
    return received
