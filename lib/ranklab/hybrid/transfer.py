"""Weights from trainers to generators, live: from shard to shard, or whole through one rank.

In reinforcement learning some ranks train and others generate, in different layouts. After an
update the generators need the new weights. checkpoint/reshard.py finds the overlap of two boxes;
here both boxes are in the memory of ranks, and only the overlap is sent.
"""

import math

import torch
import torch.distributed as dist

from ranklab.checkpoint.reshard import overlap


def transfer_weights(pieces, held, wanted, group=None):
    """Fill the generators' pieces with the trainers' weights, each number sent directly.

    Collective: all ranks of the group call it, trainers and generators.
    pieces: this rank's Pieces. A trainer's are read, a generator's are filled in place.
    held, wanted: the map, the same on all ranks: for each rank of the group a list of its Pieces,
        whose tensors are on `meta`: shapes and dtypes only. held[r] is empty for a generator, and
        wanted[r] for a trainer; on rank r, pieces[i] is held[r][i] or wanted[r][i].
        Boxes of two trainers are equal (replicas), or share no numbers.
    Numbers travel in the generator's dtype; the trainer's may be wider.
    On NCCL a new group needs one collective of all its ranks first (batch_isend_irecv, torch 2.13).
    Replicas share the sending: each of the k holders of a box sends a k-th of the part that a
        generator needs, rounded up to rows.
    Raises: ValueError on every rank, before anything is sent, if a generator needs numbers that no
        trainer holds; the message names the piece.
    Cost: a generator receives each number of its pieces once, a trainer receives nothing.
    Lab: 12
    """
    rank, ops, received = dist.get_rank(group), [], []
    for sender, i, receiver, j, part in routes(held, wanted):
        if rank == sender:
            numbers = part(wanted[receiver][j], pieces[i])[1].to(wanted[receiver][j].tensor.dtype)
            ops.append(dist.P2POp(dist.isend, numbers.contiguous(), group=group,
                                  group_peer=receiver))
        if rank == receiver:
            space = part(pieces[j], held[sender][i])[0]
            numbers = torch.empty(space.shape, dtype=space.dtype, device=space.device)
            ops.append(dist.P2POp(dist.irecv, numbers, group=group, group_peer=sender))
            received.append((space, numbers))
    # One batch, in an order that all ranks share: between two ranks there may be many messages.
    for work in dist.batch_isend_irecv(ops) if ops else []:
        work.wait()
    for space, numbers in received:
        space.copy_(numbers)


def routes(held, wanted):
    """List the messages: (sender, number of its Piece, receiver, number of its Piece, part).

    `part` takes both Pieces, and returns the views of their overlap to send: (view, view).
    Raises: ValueError if a wanted Piece has numbers that no rank holds.
    """
    holders, moves = {}, []  # {a box: [(rank, number of its Piece), ...]}
    for rank, pieces in enumerate(held):
        for i, piece in enumerate(pieces):
            holders.setdefault((piece.name, *box_of(piece)), []).append((rank, i))
    for receiver, pieces in enumerate(wanted):
        for j, want in enumerate(pieces):
            count = 0
            for (name, *_), copies in holders.items():
                if name != want.name:
                    continue
                rank, i = copies[0]
                count += overlap(want, held[rank][i].offset, held[rank][i].tensor)[0].numel()
                parts = [(*copy, receiver, j, part_of(k, len(copies)))
                         for k, copy in enumerate(copies)]
                moves += [each for each in parts if each[-1](want, held[rank][i])[0].numel()]
            if count != want.tensor.numel():
                raise ValueError(f"{want.name} at {tuple(want.offset)}: rank {receiver} needs "
                                 f"{want.tensor.numel()} numbers, the trainers hold {count}")
    return moves


def box_of(piece):
    return tuple(piece.offset), tuple(piece.tensor.shape)


def part_of(k, parts):
    """Return the function that cuts part number k of `parts` out of the overlap of two Pieces."""
    def part(target, source):
        views = overlap(target, source.offset, source.tensor)
        return tuple(torch.atleast_1d(view).tensor_split(parts)[k] for view in views)

    return part


def broadcast_weights(pieces, held, wanted, group=None):
    """Transfer whole tensors: gather them on the first trainer, then pass them along a chain.

    The chain is the first trainer and the generators, in rank order. Each generator receives whole
    tensors and cuts its pieces out of them.
    Cost: the first holder of each box sends it to the first trainer. The first trainer and all
        generators but the last send each tensor; all generators receive it.
    """
    rank, chain, boxes = dist.get_rank(group), chain_of(held, wanted), first_boxes(held)
    names = {piece.name: piece for of_rank in wanted for piece in of_rank}
    for name, like in names.items():
        whole = torch.empty(like.shape, dtype=like.tensor.dtype, device=pieces[0].tensor.device)
        for holder, i in (place for key, place in boxes.items() if key[0] == name):
            box = held[holder][i]
            space = overlap(box._replace(offset=(0,) * len(like.shape), tensor=whole),
                            box.offset, box.tensor)[0]
            if rank == holder == chain[0]:
                space.copy_(pieces[i].tensor)
            elif rank == holder:
                dist.send(pieces[i].tensor.to(whole.dtype).contiguous(), group=group,
                          group_dst=chain[0])
            elif rank == chain[0]:
                numbers = torch.empty_like(space, memory_format=torch.contiguous_format)
                dist.recv(numbers, group=group, group_src=holder)
                space.copy_(numbers)
        if rank in chain:
            place = chain.index(rank)
            if place > 0:
                dist.recv(whole, group=group, group_src=chain[place - 1])
            if place + 1 < len(chain):
                dist.send(whole, group=group, group_dst=chain[place + 1])
        for piece in pieces if wanted[rank] else ():
            if piece.name == name:
                target, source = overlap(piece, (0,) * whole.dim(), whole)
                target.copy_(source)


def chain_of(held, wanted):
    """List the ranks of the chain: the first trainer, then the generators."""
    trainer = next(rank for rank, pieces in enumerate(held) if pieces)
    return [trainer, *(rank for rank, pieces in enumerate(wanted) if pieces)]


def first_boxes(held):
    """Return {(name, offset, sizes): (rank, number of its Piece)}, the first holder of each box."""
    boxes = {}
    for rank, pieces in enumerate(held):
        for i, piece in enumerate(pieces):
            boxes.setdefault((piece.name, *box_of(piece)), (rank, i))
    return boxes


def transfer_bytes(held, wanted):
    """Return [(bytes sent, bytes received) by each rank] in transfer_weights."""
    sent, received = ([0] * len(held) for _ in range(2))
    for sender, i, receiver, j, part in routes(held, wanted):
        size = part(wanted[receiver][j], held[sender][i])[0].nbytes
        sent[sender] += size
        received[receiver] += size
    return list(zip(sent, received))


def broadcast_bytes(held, wanted):
    """Return [(bytes sent, bytes received) by each rank] in broadcast_weights."""
    names = {piece.name: piece for of_rank in wanted for piece in of_rank}
    chain, whole = chain_of(held, wanted), sum(
        math.prod(piece.shape) * piece.tensor.itemsize for piece in names.values())
    sent, received = ([0] * len(held) for _ in range(2))
    for (name, _, sizes), (holder, _) in first_boxes(held).items():
        if name in names and holder != chain[0]:
            size = math.prod(sizes) * names[name].tensor.itemsize
            sent[holder] += size
            received[chain[0]] += size
    for one, other in zip(chain, chain[1:]):
        sent[one] += whole
        received[other] += whole
    return list(zip(sent, received))


def refit_bytes(weight_bytes, shards, generator_shards, copies=1, generator_copies=1):
    """Return (bytes sent by a trainer, bytes received by a generator), for sizes that divide.

    shards: parts into which the trainers cut the weights; copies: replicas of each part.
    """
    return weight_bytes * generator_copies / (shards * copies), weight_bytes / generator_shards
