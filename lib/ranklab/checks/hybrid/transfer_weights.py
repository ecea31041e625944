"""The check of transfer_weights: real trainers and generators, in pairs of layouts."""

import math
from typing import NamedTuple

import torch
import torch.distributed as dist

from ranklab.checks.prover import AtMost, Must, Proof, Slip, Stage, Told
from ranklab.checks.prover.slips import edited
from ranklab.checks.trial import NO_ERROR, gathered, refusal
from ranklab.engine import device
from ranklab.hybrid.transfer import broadcast_weights, routes, transfer_weights
from ranklab.meter import Traffic
from ranklab.trainer.parallel import Piece, flat_pieces

SHAPES = {"up": (6, 8), "down": (6, 8), "bias": (8,), "head": (5, 7), "scale": ()}
OLD = -1.0
STARTS_AT = {name: 100.0 * place for place, name in enumerate(SHAPES)}


class Side(NamedTuple):
    """The layout of trainers or generators: rows x columns parts of a matrix, and copies of them.

    flat  elements in a ZeRO shard, or 0: then parts are boxes of whole rows and columns
    """

    rows: int = 1
    columns: int = 1
    copies: int = 1
    flat: int = 0

    @property
    def ranks(self):
        return self.rows * self.columns * self.copies

    def __str__(self):
        cuts = [f"{n} parts of the {side}" for n, side in ((self.rows, "rows"),
                                                           (self.columns, "columns")) if n > 1]
        cuts = ["flat shards"] if self.flat else cuts or ["whole"]
        return f"{' x '.join(cuts)}{f', {self.copies} copies' * (self.copies > 1)}"

    def pieces(self, rank, fill):
        """Return the Pieces of this rank; fill: (name, whole tensor's slice) -> its tensor."""
        part = rank % (self.rows * self.columns)
        pieces = []
        for name, shape in SHAPES.items():
            if self.flat and shape:
                n = math.prod(shape)
                first, last = (n * k // self.rows for k in (part, part + 1))
                meta = torch.empty(last - first, device="meta")
                boxes = [(piece.offset, piece.tensor.shape) for piece in
                         flat_pieces(name, "weight", shape, first, meta)]
            else:
                cuts = zip(shape, (divmod(part, self.columns)), (self.rows, self.columns))
                spans = [(n * k // parts, n * (k + 1) // parts) for n, k, parts in cuts]
                boxes = [(tuple(a for a, _ in spans), tuple(b - a for a, b in spans))]
            pieces += [Piece(name, "weight", shape, offset, fill(name, offset, sizes))
                       for offset, sizes in boxes]
        return pieces


class Pair(NamedTuple):
    """Trainers, then generators; the type of each side."""

    trainers: Side
    generators: Side
    wide: torch.dtype = torch.float32
    narrow: torch.dtype = torch.float32

    def __str__(self):
        types = {str(dtype).removeprefix("torch.") for dtype in (self.wide, self.narrow)}
        return (f"trainers: {self.trainers}; generators: {self.generators}"
                + f"; {' to '.join(sorted(types, reverse=True))}")

    @property
    def ranks(self):
        return self.trainers.ranks + self.generators.ranks

    def map(self):
        """Return (held, wanted), with tensors on meta."""
        held = [self.trainers.pieces(rank, _meta(self.wide))
                for rank in range(self.trainers.ranks)]
        wanted = [self.generators.pieces(rank, _meta(self.narrow))
                  for rank in range(self.generators.ranks)]
        return held + [[]] * len(wanted), [[]] * len(held) + wanted

    def own(self, rank):
        """Return this rank's Pieces, views of a larger tensor: their dims can't be merged."""
        if rank < self.trainers.ranks:
            return self.trainers.pieces(rank, _numbers(self.wide))
        return self.generators.pieces(rank - self.trainers.ranks, _old(self.narrow))


def _meta(dtype):
    return lambda name, offset, sizes: torch.empty(sizes, dtype=dtype, device="meta")


def _old(dtype):
    def fill(name, offset, sizes):
        whole = torch.full((*(n + 1 for n in sizes), 2), OLD, dtype=dtype, device=device())
        return whole[(*map(slice, sizes), 0)]

    return fill


def _numbers(dtype):
    def fill(name, offset, sizes):
        box = _old(dtype)(name, offset, sizes)
        return box.copy_(_whole(name)[tuple(slice(a, a + n) for a, n in zip(offset, sizes))])

    return fill


def _whole(name):
    """Return numbers that are exact in float32 and rounded in bfloat16."""
    shape = SHAPES[name]
    return (torch.arange(math.prod(shape)).view(shape) + STARTS_AT[name] + 1) * 1.01


SENT, RECEIVED = "bytes sent", "bytes received"


def _see(fn, pair, ranks):
    if pair.ranks != ranks.size:
        return
    held, wanted = pair.map()
    pieces = pair.own(ranks.index)
    before = [piece.tensor.clone() for piece in pieces]
    # In a new group of NCCL's the first call must be one of all its ranks (batch_isend_irecv).
    dist.all_reduce(torch.zeros(1, device=device()), group=ranks.group)
    with Traffic() as traffic:
        fn([*pieces], held, wanted, **ranks.keywords)
    sent, received = _enough(held, wanted, ranks.index)
    is_trainer = ranks.index < pair.trainers.ranks
    yield {**{_name(piece, pieces): Told(piece.tensor, _as_it_was) for piece in pieces
              if not is_trainer},
           **{f"the trainer's {_name(piece, pieces)}": Must(
               "as before" if torch.equal(old, piece.tensor) else "changed", "as before")
              for old, piece in zip(before, pieces) if is_trainer},
           RECEIVED: AtMost(traffic.received_bytes, received, "{:g} bytes are received; {:g} are "
                            "enough"),
           SENT: AtMost(traffic.sent_bytes, sent, "{:g} bytes are sent; {:g} are enough, if "
                        "replicas share the sending")}


def _name(piece, pieces):
    is_cut = sum(p.name == piece.name for p in pieces) > 1 or any(piece.offset)
    return piece.name + f" at {tuple(piece.offset)}" * is_cut


def _as_it_was(got, due):
    is_old = isinstance(got, torch.Tensor) and got.shape == due.shape and (got == OLD).all()
    return "as it was: nothing is filled" * bool(is_old)


def _enough(held, wanted, rank):
    """Return the bytes that this rank must send and receive; a k-th of the rows, rounded up."""
    sent = received = 0
    for receiver, pieces in enumerate(wanted):
        for want in pieces:
            received += want.tensor.nbytes * (receiver == rank)
            for have in held[rank]:
                spans = [min(a + n, b + m) - max(a, b) for a, n, b, m in zip(
                    want.offset, want.tensor.shape, have.offset, have.tensor.shape)]
                if want.name != have.name or any(span <= 0 for span in spans):
                    continue
                copies = sum(_same_box(have, copy) for of_rank in held for copy in of_rank)
                rows, *rest = spans or [1]
                sent += -(-rows // copies) * math.prod(rest) * want.tensor.itemsize
    return sent, received


def _same_box(x, y):
    return (x.name, x.offset, x.tensor.shape) == (y.name, y.offset, y.tensor.shape)


def _see_refusal(fn, pair, ranks):
    """Look at a map in which no trainer holds the first rows of the second tensor."""
    if pair.ranks != ranks.size:
        return
    held, wanted = pair.map()
    held = [[*filter(_is_there, pieces)] for pieces in held]
    pieces = pair.own(ranks.index)
    if ranks.index < pair.trainers.ranks:
        pieces = [*filter(_is_there, pieces)]
    with Traffic() as traffic:
        text = refusal(fn, pieces, held, wanted, **ranks.keywords)
    yield {"what it raises": Must(NO_ERROR if text == NO_ERROR else "a ValueError", "a ValueError"),
           "what the error does not say": Must(
               "the piece's name" if text != NO_ERROR and "down" not in text else "nothing",
               "nothing"),
           "messages before the error": AtMost(len(traffic.ops), 0)} | {
           f"{_name(piece, pieces)}, afterwards": piece.tensor for piece in pieces}


def _is_there(piece):
    return piece.name != "down" or piece.offset[0] > 0


def by_gathering(pieces, held, wanted, group=None):
    """Gather all pieces on all ranks as objects, put whole tensors together, and cut them."""
    for name in {piece.name for want in wanted for piece in want}:
        boxes = {(piece.offset, piece.tensor.shape) for have in held for piece in have
                 if piece.name == name}
        if sum(math.prod(sizes) for _, sizes in boxes) != math.prod(SHAPES[name]):
            raise ValueError(f"{name} is not whole")
    every = gathered([(piece.name, piece.shape, piece.offset, piece.tensor) for piece in pieces],
                     group)
    wholes = {}
    for have, of_rank in zip(held, every):
        for name, shape, offset, tensor in of_rank if have else ():
            whole = wholes.setdefault(name, torch.empty(shape, dtype=tensor.dtype))
            whole[tuple(slice(a, a + n) for a, n in zip(offset, tensor.shape))] = tensor
    for piece in pieces if wanted[dist.get_rank(group)] else ():
        piece.tensor.copy_(wholes[piece.name][tuple(
            slice(a, a + n) for a, n in zip(piece.offset, piece.tensor.shape))])


# --- mistakes -------------------------------------------------------------------------------------

CAST = ".to(wanted[receiver][j].tensor.dtype)"
FILL = "        space.copy_(numbers)"
PARTS = "part_of(k, len(copies))"
COPIES = "for k, copy in enumerate(copies)]"
COUNT = "if count != want.tensor.numel():"
OTHER = "if name != want.name:"


def _by(says, *programs):
    """Return the Slip of a wrong plan: each program consists of edits of the library's routes()."""
    return Slip(says, *(edited(transfer_weights, (), routes=edited(routes, program))
                        for program in programs))


PAIRS = (
    Pair(Side(2, 2), Side(1, 2)), Pair(Side(1, 2, 2), Side(2, 1)),
    Pair(Side(2, 1, 2), Side(1, 1, 2), narrow=torch.bfloat16),
    Pair(Side(4, flat=12), Side(1, 2), torch.float64), Pair(Side(3, 1), Side(3, 1)),
    Pair(Side(1, 1, 5), Side(1, 1)), Pair(Side(2, 1), Side(2, 2)), Pair(Side(1, 1, 3), Side(3, 1)))
IN_GROUPS = (Pair(Side(1, 1, 2), Side(1, 2)), Pair(Side(3, 1), Side(1, 1)), Pair(Side(1), Side(1)),
             Pair(Side(1), Side(3, 1)))
SOME = ((1, 3, 4, 5), (0, 2)), ((0, 2, 4, 5), (1, 3))
TRANSFER = Proof(
    transfer_weights,
    Stage({"all generators have the trainers' weights, to the bit, in eight pairs of layouts": (),
           "a generator receives each of its numbers once, a trainer nothing": (RECEIVED,),
           "replicas share the sending, and nothing is sent needlessly": (SENT,)},
          _see, PAIRS, (6,), oracle=by_gathering),
    Stage("inside a group of ranks", _see, IN_GROUPS, (6,), SOME, oracle=by_gathering,
          note="It was right on all ranks. Here there are groups, whose ranks are not 0 .. n-1."),
    Stage("numbers that no trainer holds are a ValueError on all ranks, and nothing is sent",
          _see_refusal, (Pair(Side(2, 2), Side(1, 2)), Pair(Side(1, 1, 4), Side(2, 1))), (6,),
          oracle=by_gathering),
    mistakes=(
        Slip("This sends whole tensors. A generator should receive the numbers of its own pieces, "
             "and nothing else.", broadcast_weights),
        _by("Here one holder of a box sends all of it, and the replicas send nothing: each of the "
            "k holders should send 1/k.",
            *((PARTS, "part_of(0, 1)", COPIES, f"for k, copy in enumerate(copies[{one}])]")
              for one in (":1", "-1:"))),
        _by("Each of the k holders sends everything, so a generator receives it k times: send only "
            "1/k.",
            (PARTS, "part_of(0, 1)")),
        Slip("This sends numbers in the trainer's dtype. The generator's dtype is enough: convert "
             "before sending.",
             (CAST, "", "dtype=space.dtype", "dtype=held[sender][i].tensor.dtype")),
        _by("A box of another tensor shares nothing with this piece: compare the names first.",
            (OTHER, "if False:")),
        Slip("piece.tensor is a view of the generator's weights: after the wait, copy the received "
             "numbers into it with space.copy_(numbers).", (FILL, "        space = numbers"),
             ("    for space, numbers in received:\n        space.copy_(numbers)\n", "")),
        Slip("isend and irecv need contiguous tensors: call .contiguous() before sending, and "
             "receive into a new tensor.",
             ("numbers.contiguous()", "numbers"),
             ("numbers = torch.empty(space.shape, dtype=space.dtype, device=space.device)",
              "numbers = space")),
        Slip("Inside a group, ranks are numbered from 0 again: use P2POp(..., group=group, "
             "group_peer=...).",
             ("group_peer=receiver", "peer=receiver", "group_peer=sender", "peer=sender")),
        Slip("Pass `group` on to get_rank and to each P2POp.",
             ("dist.get_rank(group)", "dist.get_rank()")),
        _by("If some numbers are held by no trainer, raise a ValueError on every rank: count them "
            "in the map, before anything is sent.", (COUNT, "if False:")),
        _by("Each piece must be complete: count its numbers instead of only checking that a "
            "trainer holds some.", (COUNT, "if not count:")),
        _by("The ValueError must give the piece's name.", ("{want.name} at", "a piece at")),
        _by("Raise ValueError(...): an assert raises AssertionError, and python -O drops it.",
            (COUNT, "assert count == want.tensor.numel()\n            if False:")),
    ), hints=(
        "Take one generator's piece and one trainer's box. What do they share, which other ranks "
        "hold that box, and which part of it should this rank send?",
        "All ranks go through the same map in the same order: each receiver, each of its pieces, "
        "each box of the same name, each of the k holders. The sender adds an isend of its 1/k, "
        "the receiver adds an irecv, and all others do nothing.",
        "overlap(want, box.offset, box.tensor) gives both views; tensor_split(k)[n] is part n; "
        "dist.P2POp(dist.isend, numbers.contiguous(), group=group, group_peer=receiver); then one "
        "dist.batch_isend_irecv(ops), wait, and copy what was received into the views",
    ))
