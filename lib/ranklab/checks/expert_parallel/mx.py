"""mxfp8_all_to_all, compared with a table of all 8-bit numbers."""

import math
from typing import NamedTuple

import torch
import torch.distributed as dist

from ranklab.checks.expert_parallel.dispatch import GROUP
from ranklab.checks.expert_parallel.inputs import CALLS, HANDLES, error_of, of_all
from ranklab.checks.handles import Waits
from ranklab.checks.prover import ALL, GROUPS, AtMost, Proof, Slip, Stage
from ranklab.engine import device
from ranklab.expert_parallel import mxfp8_all_to_all
from ranklab.expert_parallel.dispatch import all_to_all_rows
from ranklab.meter import Traffic

WIDTH = 64
ROWS, BYTES = "the rows, each number divided by the exact one", "bytes sent to others"


class Rows(NamedTuple):
    """Rows of all ranks, whose numbers have many sizes."""

    dtype: str
    what: str = "numbers of all sizes"

    def __str__(self):
        return f"{self.dtype}, {self.what}"

    def of(self, rank, members):
        """Return (x, to): rank number i sends i + j rows to number j, and j - i may be negative."""
        index = members.index(rank)
        to = [(2 * index + 3 * j + 1) % 4 for j in range(len(members))]
        random = torch.Generator().manual_seed(rank)
        x = torch.randn(sum(to), WIDTH, generator=random)
        x *= 2.0 ** torch.randint(-9, 10, (len(x), WIDTH // 16), generator=random
                                  ).repeat_interleave(16, 1)
        x[::3, 7] = -x[::3].abs().amax(1) * 1.9  # a block's largest number is negative
        x[1::3, :32] = 0
        x[1::3, 32:] *= 2.0**-60
        x[2::3, 40] = 448 * 2.0**4
        return x.to(device(), getattr(torch, self.dtype)), to


def _see(fn, case, ranks):
    x, to = case.of(dist.get_rank(), ranks.members)
    came = [case.of(rank, ranks.members)[1][ranks.index] for rank in ranks.members]
    away = sum(to) - to[ranks.index]
    sizes = list(to), list(came)
    with Traffic() as traffic, Waits() as waits:
        rows = fn(x, *sizes, **ranks.keywords)
    yield {"the type of the rows": str(getattr(rows, "dtype", None)),
           ROWS: _relative(rows, case, ranks), "x afterwards": x,
           HANDLES: AtMost(waits.missing(traffic.calls.total()), 0),
           BYTES: AtMost(traffic.sent_bytes, away * (WIDTH + WIDTH // 32), "{:,.0f} bytes go to "
                         "others; {:,.0f} are enough, 1 + 1/32 a number"),
           CALLS: AtMost(len(traffic.ops), 2)}
    yield {"the error with rows of 40 numbers": error_of(
        lambda: fn(x[:, :40], *sizes, **ranks.keywords))}


def _relative(rows, case, ranks):
    """Divide each number by what was sent: small ones must be as exact as large ones."""
    parts = [case.of(rank, ranks.members) for rank in ranks.members]
    sent = torch.cat([x.split(to)[ranks.index] for x, to in parts]).float()
    if not isinstance(rows, torch.Tensor) or rows.shape != sent.shape:
        return rows
    return rows.float() / sent.where(sent != 0, 1)


def rounded(x):
    """Round each block by looking up the nearest 8-bit number, of ties the even one."""
    codes = torch.arange(127, dtype=torch.uint8)  # 0 to 448, in order; 127 is NaN
    grid = codes.view(torch.float8_e4m3fn).double()
    out = torch.empty(x.shape, dtype=torch.float64)
    for i, row in enumerate(x.cpu().double()):
        for first in range(0, len(row), 32):
            block = row[first:first + 32]
            largest, power = block.abs().max().item(), -126
            while math.ldexp(448, power) < largest:
                power += 1
            size = block.abs() * 2.0**-power
            high = torch.searchsorted(grid, size).clamp(max=126)
            low = (high - 1).clamp(min=0)
            to_low, to_high = size - grid[low], grid[high] - size
            is_low = (to_low < to_high) | ((to_low == to_high) & (low % 2 == 0))
            out[i, first:first + 32] = (
                torch.where(is_low, grid[low], grid[high]) * block.sign() * 2.0**power)
    return out.to(x)


def by_a_table(x, to, came, group=None):
    """Round by a table, and send all rows to all ranks."""
    if x.shape[1] % 32:
        raise ValueError(f"rows of {x.shape[1]} numbers")
    rank, every = dist.get_rank(group), of_all(rounded(x), group)[0]
    table, _ = of_all(torch.tensor([to], device=x.device), group)
    starts = [0, *table.flatten().cumsum(0).tolist()]
    R = len(to)
    return torch.cat([every[starts[r * R + rank]:starts[r * R + rank + 1]] for r in range(R)])


def rounded_by_the_receiver(x, to, came, group=None):
    if x.shape[1] % 32:
        raise ValueError(f"rows of {x.shape[1]} numbers")
    return rounded(all_to_all_rows(x, to, came, group))


WIDE = "blocks = x.detach().float().unflatten(1, (-1, 32))"
LARGEST = "blocks.abs().amax(2, keepdim=True) / 448"
POWER = "(exponent - (mantissa == 0.5).int()).clamp(min=-126)"
SCALE = "scales.view(torch.float8_e8m0fnu).float()"
ROUND = f"(blocks / {SCALE}).to(torch.float8_e4m3fn)"
SEND_NUMBERS = "AllToAll.apply(numbers.flatten(1).view(torch.uint8), to, came, group)"
SEND_SCALES = "AllToAll.apply(scales.flatten(1), to, came, group)"
READ = "numbers.view(torch.float8_e4m3fn)"
BACK = "(blocks * scales.float()[:, :, None])"
MXFP8 = Proof(
    mxfp8_all_to_all,
    Stage({"each block of 32 rounded to 8 bits by its own power of two, on 4, 3, 2 and 1 ranks; "
           "blocks of zeros; in float32 and bfloat16": (),
           "1 + 1/32 bytes a number, in at most two all-to-alls": (BYTES, CALLS, HANDLES),
           "rows that blocks of 32 do not divide are a ValueError":
           ("the error with rows of 40 numbers",)},
          _see, (Rows("float32"), Rows("bfloat16")), (4,), (ALL, *GROUPS), oracle=by_a_table),
    mistakes=(
        Slip("Rows travel in their own type here. Send the 8-bit numbers and their scales: that "
             "is what saves the bytes.", rounded_by_the_receiver),
        Slip("The scale is rounded down, so the largest numbers of a block lie beyond 448 and are "
             "cut off. Round the power of two up.",
             (POWER, "(exponent - 1).clamp(min=-126)")),
        Slip("448 is 1.75 * 2 ** 8. This scale brings the largest number between 2 ** 8 and 2 ** 9 "
             "(OCP's rule), so what lies beyond 448 is cut off. Take the smallest power of two "
             "that leaves nothing above 448.",
             *((LARGEST, LARGEST.replace("448", "256"), POWER, "(exponent - 1).clamp(min=-126)",
                ROUND, cut) for cut in (ROUND, f"{ROUND.partition(').to(')[0]}).clamp(-448, 448)"
                                        ".to(torch.float8_e4m3fn)"))),
        Slip("A scale may be as small as 2 ** -126: a smaller range loses blocks of tiny numbers.",
             (POWER, POWER.replace("-126", "-20"))),
        Slip("Each scale is a power of two too large, so small numbers lose a bit.",
             (POWER, POWER.replace("(exponent", "(exponent + 1"))),
        Slip("If a block's largest number is exactly 448 times a power of two, that power is the "
             "scale. This takes the next one, and the smallest numbers lose a bit.",
             (POWER, "exponent.clamp(min=-126)")),
        Slip("Without a scale, numbers beyond 448 are cut off and small ones become 0.",
             (POWER, "exponent * 0")),
        Slip("Each block of 32 has a scale of its own. Here the row's largest number sets the "
             "scale for all of its blocks.",
             (LARGEST, "blocks.abs().amax((1, 2), keepdim=True).expand(-1, x.shape[1] // 32, 1) "
              "/ 448")),
        Slip("Here one scale serves all rows of this rank. Each block of 32 has its own.",
             (LARGEST, "(blocks.abs().amax() if len(x) else x.new_zeros(())).float().expand("
              "len(x), x.shape[1] // 32, 1) / 448")),
        Slip("The largest number of a block may be negative: abs() first.",
             (LARGEST, "blocks.amax(2, keepdim=True).clamp(min=1e-9) / 448")),
        Slip("A block is 32 consecutive numbers of one row: unflatten(1, (-1, 32)).",
             (WIDE, "blocks = x.detach().float().unflatten(1, (32, -1)).transpose(1, 2)")),
        Slip("The scale is a power of two: one byte, its exponent + 127, is enough.",
             *((SEND_SCALES, f"AllToAll.apply(scales.flatten(1){wide}, to, came, group)"
                ".to(torch.uint8)") for wide in (".int()", ".float()", ".long()"))),
        Slip("The receiver must know the sender's scales: they travel with the rows.",
             (SEND_SCALES, "torch.cat([scales.flatten(1), scales.new_full((sum(came), "
              "scales.shape[1]), 127)])[:sum(came)]")),
        Slip("The receiver must multiply each block by its scale. These numbers are still divided "
             "by it.",
             (BACK, "blocks")),
        Slip("Divide by the scale, then round, then multiply by it. This does it the other way "
             "round.", (ROUND, ROUND.replace("/", "*"), BACK, BACK.replace("*", "/"))),
        Slip("The numbers are off by a factor of two. The byte is the exponent + 127, so subtract "
             "exactly 127.",
             (BACK, f"{BACK[:-1]} * 2)"), (BACK, f"{BACK[:-1]} / 2)")),
        Slip("float8_e5m2 has one mantissa bit fewer: round to float8_e4m3fn.",
             (ROUND, ROUND.replace("e4m3fn", "e5m2"), READ, READ.replace("e4m3fn", "e5m2"))),
        Slip("These are 8-bit whole numbers, with equal steps. float8_e4m3fn has smaller steps for "
             "smaller numbers.",
             (ROUND, ROUND.replace(".to(torch.float8_e4m3fn)",
                                   ".mul(127 / 448).round().to(torch.int8)"),
              READ, "numbers.view(torch.int8).float().mul(448 / 127)")),
        Slip("Return the rows in the dtype of x.", (".flatten(1).to(x.dtype)", ".flatten(1)")),
        Slip("AllToAll sends rows: dim 0 of what you send must be the rows of x. Pass `to` first, "
             "then `came`.",
             (SEND_NUMBERS, SEND_NUMBERS.replace("to, came", "came, to"))),
        Slip("`x` is an argument: work on a copy.", (WIDE, f"{WIDE}\n    x.data.zero_()")),
        Slip("Rows that blocks of 32 do not divide are a ValueError.",
             ("if x.shape[1] % 32:", "if False:")),
        Slip(GROUP, (SEND_NUMBERS, SEND_NUMBERS.replace("group", "None"), SEND_SCALES,
                     SEND_SCALES.replace("group", "None"))),
    ), hints=(
        "What is the largest number that float8_e4m3fn can hold, and what must a block be divided "
        "by, so that its own largest number fits?",
        "mantissa, exponent = torch.frexp(largest / 448) gives largest / 448 = mantissa * 2 ** "
        "exponent, with a mantissa from 0.5 up to 1. So 2 ** exponent is large enough, and half of "
        "it too if the mantissa is exactly 0.5.",
        "scales = (exponent + 127).to(torch.uint8); scales.view(torch.float8_e8m0fnu).float() are "
        "the powers of two; (blocks / powers).to(torch.float8_e4m3fn); send both as "
        ".view(torch.uint8), and multiply numbers.float() by the powers that came",
    ))
