"""What the checks of lab 02 share: inputs, one trial for all verbs, and what is said of a sum.

Inputs are a function of the rank. So each rank makes those of the others, too, and adds them up:
no other collective is needed as an oracle. What a verb sent comes back to the check (traffic.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from ranklab.checks.beside import GROUPINGS, beside, expect, on_groups
from ranklab.checks.handles import DROPPED, drops_handles
from ranklab.engine import device
from ranklab.engine.report import rank_names
from ranklab.meter import Traffic

MARK = 128  # ranks are counted to its base: a sum of marks tells how often each rank is in it
WORLD_SIZES = (2, 3, 8, 1)  # for plain cases, 1 last: it has a hint of its own
BREAKS = r"(\w+Error: |was killed |hang: ).*"  # whatever is no wrong value
ALONE = "With one rank there is nobody to talk to: the loop must not run at all."
UNEVEN = ("R does not divide this length: chunks differ by one, and some may be empty. "
          "tensor_split cuts any length, x's and that of `out`.")
GROUP = ("Pass `group` on wherever you ask or send: get_rank(group), get_world_size(group), "
         "sendrecv(..., group), dist.send(..., group=group, group_dst=...).")
ROOT = "`src` and `server` are ranks inside the group, so pass them as group_src or group_dst."
SEND_WAITS = ("A send waits until its receiver receives, and here nobody receives. `sendrecv` "
              "sends and receives at the same time; without it, only one of the two may send "
              "first.")
FAILURES = {
    "RuntimeError: view size is not compatible .*": "Here x is not contiguous, and torch.empty_like"
    "(x) keeps its strides, so that view fails: x.new_empty(x.shape) is contiguous.",
    "(Runtime|Value)Error: .*be contiguous.*": "Here x is not contiguous, and a message must be. "
    "x.clone() and torch.empty_like(x) keep the strides; x.contiguous(), x.flatten() and "
    "x.new_empty(x.shape) do not.",
}
ADVICE = {
    "x": "x itself is changed. Receive and add into a copy of x, or into what arrived. (Chunks "
    "that are cut from x are views of x.)",
    "`out`": "Let what arrives land in the chunks of `out`, and add your share there, in place: "
    "arriving.add_(mine[i]). `a = a + b` makes a new tensor elsewhere. On one rank copy x there.",
    "type": "Make every buffer with empty_like or new_empty: same type, same device.",
    "strided": "x is not contiguous here. torch.empty_like(x) keeps its strides, and then chunks "
    "are copies: x.new_empty(x.shape) is contiguous.",
    "mean": "Do not divide by R: code that wants the mean does it afterwards.",
    "lacks": "Either there are too few steps, or what arrived is passed on without your own share, "
    "or it is thrown away.",
    "twice": "Something is added twice: one step too many, or a partner that has it already.",
    "both": "What arrives needs a place of its own: do you receive into the tensor that you send, "
    "or that you add to?",
}


class Case(NamedTuple):
    """One input. kind: "marks" (whose x is in it?), "numbers" (exact in every type), "normal"."""

    n: int
    dtype: str = "float32"
    kind: str = "numbers"
    strided: bool = False
    root: int = 0
    has_out: bool = False

    def __str__(self):
        shape = "a matrix that is not contiguous" if self.strided else f"{self.n} elements"
        return f"{shape}, {self.dtype}" + ", `out` given" * self.has_out

    def x(self, rank, turn=0):
        """The input of `rank`: the same tensor on every rank that asks."""
        if self.kind == "marks":
            return torch.full((self.n,), float(MARK**rank), dtype=torch.float64)
        if self.kind == "normal":
            generator = torch.Generator().manual_seed(rank + 9 * turn)
            return torch.randn(self.n, generator=generator)
        # Small whole numbers: the sum of 8 ranks is exact in bfloat16 too, in any order.
        x = (torch.arange(self.n) * 7 + rank * 5 + 3 * turn) % 13 - 6
        x = x.to(getattr(torch, self.dtype))
        if self.dtype in FINE:
            x = x * FINE[self.dtype]
        return x.reshape(2, -1).t() if self.strided else x


TYPES = [Case(24, dtype=dtype) for dtype in ("float32", "float64", "bfloat16", "int64")]
FINE = {"float64": 1 + 2.0**-26, "int64": 2**40 + 1}  # times whole numbers: lost in float32
MARKS = Case(24, "float64", "marks")
# Lengths that R does not divide, shorter than R, and a matrix that is not contiguous.
UNEVEN_CASES = [*map(Case, (1001, 7, 2, 1, 0)), Case(24, strided=True)]
INTO = [Case(48, has_out=True), Case(1001, has_out=True), Case(24, strided=True, has_out=True)]


class Result(NamedTuple):
    """What a rank got, for those that name its mistake."""

    got: torch.Tensor
    right: torch.Tensor
    xs: list  # of each rank of the group
    ranks: object
    case: Case
    traffic: Traffic


@dataclass(frozen=True)
class Verb:
    """How an exercise is called, and what is right.

    right   the xs of all ranks, case -> [the result of each rank]
    slips   Result -> {what a mistake gets: (tensor, hint)}
    advice  where the shape is right, and nothing else fits; `shape`: where it is wrong
    call    fn, x, case, keywords, what `prepare` returned -> the result
    give    case, Ranks, turn -> (x, `out` or None) of this rank
    xs      case, Ranks, turn -> [x of each rank]
    part    what of `out` is looked at
    """

    right: Callable
    slips: Callable = lambda result: of_sum(result)
    advice: str = ""
    shape: str = ("Compare with the docstring's first line. (When R does not divide the length, "
                  "tensor_split says how long each chunk is.)")
    call: Callable = lambda fn, x, case, keywords, prepared: fn(x, **keywords)
    prepare: Callable = lambda: None
    xs: Callable = lambda case, ranks, turn: [case.x(r, turn) for r in ranks.members]
    give: Callable = lambda case, ranks, turn: (
        x := case.x(dist.get_rank(), turn).to(device()), torch.full(x.shape, 99).to(x))
    part: Callable = lambda out, ranks: out


def run(fn, verb, cases, ranks, hint="", **launch):
    """[(the result, Traffic) of each rank] of each case, where all of them are right.

    hint  for whatever breaks or hangs here, and has no hint of its own
    """
    hint = ALONE if ranks == 1 else hint
    failures = ({"hang: .*": DROPPED} if drops_handles(fn) else {}) | FAILURES | {
        r"hang: .*\bsend\b.*": f"{SEND_WAITS} {hint}".strip()} | ({BREAKS: hint} if hint else {})
    notes = on_groups(_trial, fn, cases, verb, ranks=ranks, failures=failures,
                      groupings=((tuple(range(ranks)),),), **launch)
    return list(zip(*notes))


def stays_in_group(fn, verb, has_out=True, hint=GROUP):
    """In groups it talks to nobody outside, also where an `out` is given."""
    on_groups(_trial, fn, [MARKS._replace(root=1)], verb, groupings=GROUPINGS[1:],
              failures={".*": hint}, group_hint="")
    if has_out:
        on_groups(_trial, fn, [MARKS._replace(has_out=True)], verb, groupings=GROUPINGS[2:],
                  failures={".*": "In a group it was right, and with `out` as well it is not. "
                                  f"{hint}"},
                  group_hint="")


def _trial(fn, ranks, cases, verb):
    prepared = verb.prepare()
    for case in cases:
        yield from _looks(fn, ranks, case._replace(root=min(case.root, ranks.size - 1)), verb,
                          prepared)


def _looks(fn, ranks, case, verb, prepared):
    calls, where = [], f"{ranks}, {case}"

    def call(turn):
        x, out = verb.give(case, ranks, turn)
        keywords = ranks.keywords | ({"out": out} if case.has_out else {})
        with Traffic() as traffic:
            got = verb.call(fn, x, case, keywords, prepared)
        calls.append((got, x, traffic))
        given = {"`out`": verb.part(out, ranks)} if case.has_out else {}
        return {"the result": got, "x": x, **given}

    def right(turn):
        xs = verb.xs(case, ranks, turn)
        results = verb.right(xs, case)
        return {"the result": results, "x": xs, **({"`out`": results} if case.has_out else {})}

    def slips(name, turn):
        got, results = calls[turn][0], right(turn)["the result"]
        if name == "`out`":
            wrong = torch.full_like(results[ranks.index], 99)
            return {"as it was: nothing was written there": (wrong, ADVICE["`out`"])}
        if name != "the result" or not isinstance(got, torch.Tensor):
            return {}
        got, wanted = got.detach().cpu(), results[ranks.index]
        narrow = {"what is right, rounded to float32": (wanted.float().to(wanted), ADVICE["type"])}
        return (narrow if case.dtype in FINE and case.kind == "numbers" else {}) | verb.slips(
            Result(got, wanted, verb.xs(case, ranks, turn), ranks, case, calls[turn][2]))

    def advice(name):
        got, wanted = calls[0][0], right(0)["the result"][ranks.index]
        if name in ADVICE:
            return ADVICE[name]
        if not isinstance(got, torch.Tensor):
            return "Return the result, one tensor; x itself stays as it is."
        if got.shape != wanted.shape:
            return verb.shape
        return ADVICE["type" if got.dtype != wanted.dtype else "strided"] if (
            got.dtype != wanted.dtype or case.strided) else verb.advice

    yield from beside(where, ranks, call, right, slips=slips, advice=advice,
                      own=lambda turn: {"the result": calls[turn][1]})
    got, x, traffic = calls[0]
    yield lambda: expect(case.has_out or not x.numel() or got.data_ptr() != x.data_ptr(),
                         f"{where}: the result is x itself, not a new tensor", "Code that writes "
                         "into the result would write into x: return a copy.")
    yield lambda: (got.detach().cpu(), traffic)


def of_sum(result, hints=ADVICE):
    """What is said of a sum: it is the mean; or which ranks are missing in it, or twice.

    hints  of one's own for "lacks", "twice" or "both"
    """
    got, right, R = result.got, result.right, result.ranks.size
    named = {"the mean, not the sum": (right / R, ADVICE["mean"])} if R > 1 else {}
    if result.case.kind == "marks" and got.shape == right.shape:
        times = {r: int(got.flatten()[0]) // MARK**r % MARK for r in range(dist.get_world_size())}
        lacks = [r for r in result.ranks.members if not times[r]]
        twice = [r for r, n in times.items() if n > 1]
        others = [r for r, n in times.items() if n and r not in result.ranks.members]
        texts = [text.format(rank_names(found)) for text, found in (
            ("lacks {}", lacks), ("counts {} more than once", twice),
            ("has {}, not of this group", others)) if found]
        hint = (ADVICE | hints)["both" if lacks and twice else "lacks" if lacks else "twice"]
        if texts:
            named[f"a sum that {' and '.join(texts)}"] = got, hint
    return named
