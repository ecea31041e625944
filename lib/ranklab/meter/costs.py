"""What one op costs one rank: bytes sent, bytes received, messages.

Point-to-point ops count what they send: `send` costs its tensor, and so do all_to_all, gather and
scatter, which go straight from rank to rank (a rank's own part is a copy in memory and costs
nothing). A backend may do the other collectives in its own way: by a ring, a tree, the switch.
For them we count what the bandwidth-optimal ring sends. With R ranks and N bytes in the full
tensor:

    all_reduce       2 (R-1)/R N in 2(R-1) messages: a reduce_scatter, then an all_gather
    reduce_scatter     (R-1)/R N in R-1 messages; N = the input
    all_gather         (R-1)/R N in R-1 messages; N = the output
    broadcast        N from every rank but the last of the chain root, root+1, ..., root-1
    reduce           N from every rank but the last of the chain root+1, ..., root
    barrier          0

When N does not divide by R, chunk sizes differ by one element, as in torch.tensor_split. So every
count is a whole number, and the sum over all ranks is exactly R times the formula.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Op:
    """One call of one rank. All ranks named here are global ranks."""

    name: str  # "all_reduce", "send", ...
    payload_bytes: int  # the larger of input and output on this rank, N above; all_to_all: input
    sent_bytes: int
    messages: int  # messages sent; in a ring its steps, including those with an empty chunk
    peer: int | None  # the other end of a send or recv; None: a collective, or recv from anyone
    group_size: int
    received_bytes: int = 0
    group: tuple = ()  # the ranks of the group, in the group's order
    sent_to: tuple = ()  # (rank, bytes) of each receiver, if the op itself names the receivers


@dataclass(frozen=True)
class Group:
    """The ranks that take part in an op, seen from one of them."""

    ranks: tuple  # global ranks; the index in the tuple is the rank inside the group
    place: int  # this rank's index in `ranks`

    def op(self, name, payload, sent=0, received=0, messages=0, peer=None, sent_to=()):
        size = len(self.ranks)
        return Op(name, payload, sent, messages, peer, size, received, self.ranks, sent_to)

    def send(self, payload, place):
        peer = self.ranks[place]
        return self.op("send", payload, payload, 0, 1, peer, ((peer, payload),))

    def recv(self, payload, place):
        """Receive from the rank at `place` of the group; None: from anyone."""
        peer = None if place is None else self.ranks[place]
        return self.op("recv", payload, received=payload, peer=peer)

    def ring(self, name, chunks):
        """Count one pass of `chunks` around a ring, in which each rank sends to the next.

        chunks: the bytes of each rank's chunk. In a reduce_scatter chunk r ends on rank r, so it
        began on rank r+1; in an all_gather it begins on rank r, and the rank before r does not
        pass it on. An all_reduce is a reduce_scatter, then an all_gather.
        """
        size, total = len(chunks), sum(chunks)
        local, following, preceding = (chunks[(self.place + step) % size] for step in (0, 1, -1))
        sent = received = steps = 0
        if name != "all_gather":
            sent += total - local
            received += total - preceding
            steps += size - 1
        if name != "reduce_scatter":
            sent += total - following
            received += total - local
            steps += size - 1
        return self.op(name, total, sent, received, messages=steps)

    def chain(self, name, payload, start):
        """Receive from the rank before and send to the next, once around from `start`."""
        place, size = (self.place - start) % len(self.ranks), len(self.ranks)
        receives, sends = place > 0, place < size - 1
        return self.op(name, payload, payload * sends, payload * receives, int(sends))

    def direct(self, name, payload, outgoing=(), incoming=()):
        """Send outgoing[i] bytes to rank i of the group; receive incoming[i] bytes from it."""
        sent_to = tuple((self.ranks[i], n) for i, n in enumerate(outgoing)
                        if n and i != self.place)
        received = sum(n for i, n in enumerate(incoming) if i != self.place)
        sent = sum(n for _, n in sent_to)
        return self.op(name, payload, sent, received, len(sent_to), sent_to=sent_to)
