"""The cost model: alpha_beta_time, fit_alpha_beta, crossover_bytes. Nothing is launched."""

import math
from typing import NamedTuple

import numpy as np

from ranklab.checks.prover import AtMost, Proof, Slip, Stage
from ranklab.collectives import alpha_beta_time, crossover_bytes, fit_alpha_beta
from ranklab.engine.report import count_ranks

ALPHA, BETA = 2, 1e-3  # of round numbers, so that a learner can check a time by hand
ERROR = "a ValueError"
ODD_ROUNDS = "rounds if R == 2**rounds else rounds + 1"


def outcome(errors, fn, *args):
    """Return the result of fn(*args), or which of these errors it raises."""
    try:
        return fn(*args)
    except errors as error:
        return ERROR if isinstance(error, ValueError) else f"a {type(error).__name__}"


# --- alpha_beta_time ------------------------------------------------------------------------------

class Run(NamedTuple):
    """One run of an algorithm over links of `alpha` seconds per message and `beta` per byte."""

    algorithm: str
    ranks: int
    nbytes: float
    alpha: float = ALPHA
    beta: float = BETA

    def __str__(self):
        return (f"{self.algorithm}, {count_ranks(self.ranks)}, {self.nbytes:g} bytes, "
                f"alpha={self.alpha:g}, beta={self.beta:g}")


def _see_time(fn, case):
    args = case.algorithm, case.nbytes, case.ranks, case.alpha, case.beta
    if case.algorithm in ALGORITHMS:
        yield {"the time": fn(*args)}
    else:
        yield {"the outcome": outcome(Exception, fn, *args)}


def seconds_of_steps(algorithm, nbytes, ranks, alpha, beta):
    """Go through the algorithm step by step and add up the seconds, with no formula."""
    if algorithm == "ring":
        steps = [nbytes / ranks for _ in ("reduce", "gather") for _ in range(ranks - 1)]
    elif algorithm == "parameter_server":
        steps = [nbytes for _ in ("in", "out") for _ in range(ranks - 1)]
    elif algorithm in ALGORITHMS:
        steps, have = [], 1
        while have < ranks:
            steps, have = [*steps, nbytes], 2 * have
        if algorithm == "recursive_doubling" and have != ranks:
            steps.append(nbytes)
    else:
        raise ValueError(algorithm)
    return sum(alpha + n * beta for n in steps)


ALGORITHMS = "ring", "tree_broadcast", "recursive_doubling", "parameter_server"
RUNS = tuple(Run(algorithm, ranks, nbytes) for algorithm in ALGORITHMS
             for ranks in (3, 1, 2, 4, 8, 13, 1024) for nbytes in (1000, 0, 1e8))
STEPS, CEIL = "steps * (alpha + step_bytes * beta)", "math.ceil(math.log2(ranks))"
RING, SERVER, KNOWN = "(2 * (R - 1), nbytes / R)", "(2 * (R - 1), nbytes),", "if algorithm not in"
TREE, SWAPS = "(rounds, nbytes)", "(swaps, nbytes)"
TIME = Proof(
    alpha_beta_time,
    Stage({"right for the ring, the tree, doubling and the server; 1 to 1024 ranks; 0 B to 100 MB":
           (), "a ValueError for an algorithm that it does not know": ("the outcome",)},
          _see_time, (*RUNS, Run("rign", 4, 1000)), oracle=seconds_of_steps),
    mistakes=(
        Slip("alpha is paid once per step, not once in all: every step is a message.",
             (STEPS, "alpha + steps * step_bytes * beta")),
        Slip("Every step also pays alpha.", (STEPS, "steps * step_bytes * beta")),
        Slip("alpha is paid for a message, beta for a byte: they are swapped.",
             (STEPS, "steps * (beta + step_bytes * alpha)")),
        Slip("beta is seconds per byte; you count bits.",
             (STEPS, "steps * (alpha + 8 * step_bytes * beta)")),
        Slip("beta is seconds per byte, one over the bandwidth: multiply by it.",
             (STEPS, "steps * (alpha + step_bytes / beta)")),
        Slip("The ring goes round twice, to reduce and to gather.", (RING, "(R - 1, nbytes / R)")),
        Slip("Once round the ring is R-1 steps: a chunk need not come back to where it began.",
             (RING, "(2 * R, nbytes / R)")),
        Slip("A step of the ring moves one chunk, 1/R of the bytes.",
             (RING, "(2 * (R - 1), nbytes)")),
        Slip("In the ring nbytes / ranks, not nbytes // ranks: the model has no reason to round a "
             "chunk.", (RING, "(2 * (R - 1), nbytes // R)")),
        Slip("The server: R-1 tensors come in, then R-1 go out.", (SERVER, "(R - 1, nbytes),")),
        Slip("The server has its own x: R-1 workers send theirs, not R.",
             (SERVER, "(2 * R, nbytes),")),
        Slip("All workers share the server's one link: their R-1 tensors come one after the other, "
             "and so do the R-1 answers.", (SERVER, "(2, nbytes),")),
        Slip("The server takes whole tensors, no chunks.", (SERVER, "(2 * (R - 1), nbytes / R),")),
        Slip("There is no fraction of a round: round log2 R up when R is no power of two.",
             (CEIL, "math.log2(ranks)")),
        Slip("A round is missing: round log2 R up (math.ceil), not down.",
             ("math.ceil", "math.floor")),
        Slip("In each round the ranks that have it double: that is log2, not ln.",
             ("math.log2", "math.log")),
        Slip("Doubling needs one step more when R is no power of two: the extra ranks hand over "
             "first.", (ODD_ROUNDS, "rounds")),
        Slip("Doubling: only where R is no power of two is there one step more.",
             (ODD_ROUNDS, "rounds + 1")),
        Slip("Only doubling has one step more when R is no power of two. In a broadcast nobody has "
             "to hand over first.", (TREE, "(swaps, nbytes)")),
        Slip("In the tree every rank that has it sends in each round. They double: it takes "
             "ceil(log2 R) rounds, not R-1.", (TREE, "(R - 1, nbytes)")),
        Slip("A tree's rounds all go one way: a broadcast has nothing to send back.",
             (TREE, "(2 * rounds, nbytes)")),
        Slip("In a swap both ranks send at the same time: it is one step, not two.",
             (SWAPS, "(2 * swaps, nbytes)")),
        Slip("Doubling swaps whole tensors, no chunks.", (SWAPS, "(swaps, nbytes / R)")),
        Slip("The tree sends whole tensors, no chunks.", (TREE, "(rounds, nbytes / R)")),
        Slip("Raise a ValueError for unknown names. Say in a sentence which names there are.",
             (KNOWN, "if False and algorithm not in"),
             (KNOWN, "if False and algorithm not in", "costs[algorithm]",
              'costs.get(algorithm, costs["ring"])')),
    ), hints=(
        "For each algorithm: how many steps, one after the other, and how many bytes in a step?",
        "Ring: 2(R-1) steps of nbytes/R. Server: 2(R-1) steps of nbytes. Tree: ceil(log2 R) steps "
        "of nbytes. Doubling: like the tree, and one more if R is no power of two.",
        "return steps * (alpha + step_bytes * beta), after looking up (steps, step_bytes) in a "
        "dict; raise ValueError for a name that is not in it.",
    ))


# --- fit_alpha_beta -------------------------------------------------------------------------------

class Measured(NamedTuple):
    """Times of messages. `noise` is a factor of each; `error` is the allowed error in percent."""

    name: str
    sizes: tuple
    noise: tuple | float = 1.0
    alpha: float = 2e-5
    beta: float = 1e-9
    error: float = 1e-4
    as_arrays: bool = False

    def __str__(self):
        return self.name

    def measurements(self):
        sizes = np.array(self.sizes)
        seconds = (self.alpha + self.beta * sizes) * self.noise
        return (sizes, seconds) if self.as_arrays else (sizes.tolist(), seconds.tolist())


def _see_fit(fn, case):
    sizes, seconds = case.measurements()
    if len({*case.sizes}) < 2:
        yield {"the outcome": outcome(Exception, fn, sizes, seconds)}
        return
    pair = outcome(ValueError, fn, sizes, seconds)
    is_pair = np.size(pair) == 2
    is_as_before = all(map(np.array_equal, (sizes, seconds), case.measurements()))
    yield {"what it returns": "a pair (alpha, beta)" if is_pair else pair,
           **(_errors(case, *np.ravel(pair)) if is_pair else {}),
           "sizes and seconds afterwards": "as before" if is_as_before else "changed"}


def _errors(case, alpha, beta):
    """Return the error of each in percent."""
    says = (f"give alpha={alpha:.4g}, beta={beta:.4g}; they were made with alpha={case.alpha:g}, "
            f"beta={case.beta:g}, and {{1:g}}% more or less are right")
    errors = {"alpha": abs(alpha / case.alpha - 1), "beta": abs(beta / case.beta - 1)}
    return {name: AtMost(math.inf if math.isnan(error) else 100 * error, case.error, says)
            for name, error in errors.items()}


def fit_by_polyfit(sizes, seconds):
    if len({*sizes}) < 2:
        raise ValueError("one size")
    beta, alpha = np.polyfit(sizes, seconds, 1, w=1 / np.asarray(seconds))
    return alpha, beta


SIZES, TWICE = (1e3, 1e4, 1e5, 1e6, 1e7, 1e8), (1e3, 1e3, 1e6, 1e6)
UNSORTED = Measured("sizes in any order, some twice", (1e5, 1e5, 1e3, 1e7, 1e5), alpha=2e-6,
                    beta=2e-8, as_arrays=True)
NOISY = Measured("times with 10% of noise", SIZES, (1.1, 0.9) * 3, error=7)
REPEATED = tuple(UNSORTED._replace(name=f"sizes measured twice, {what}", sizes=TWICE,
                                   noise=noise, error=7, as_arrays=False)
                 for what, noise in (("10% too slow, then 10% too fast", (1.1, 0.9) * 2),
                                     ("10% too fast, then 10% too slow", (0.9, 1.1) * 2)))
SAME = tuple(Measured(f"one size only, {[1000] * n}", (1e3,) * n, (1.0, 1.1, 1.2)[:n])
             for n in (2, 1, 3))
ROWS, ONES, DIFFERENT = ("[1 / seconds, sizes / seconds]", "np.ones(len(sizes))",
                         "len(set(sizes.tolist())) < 2")
PAIR, START = "float(alpha), float(beta)", "    rows ="
FIT = Proof(
    fit_alpha_beta,
    Stage("finds alpha and beta again from exact times", _see_fit,
          (Measured("exact times", SIZES),), oracle=fit_by_polyfit),
    Stage("10% of noise on each time moves neither by more than 7%", _see_fit, (NOISY,),
          oracle=fit_by_polyfit),
    Stage("sizes in any order, some twice, or two of them alone", _see_fit,
          (UNSORTED, UNSORTED._replace(name="two sizes", sizes=(1e5, 1e3), as_arrays=False),
           *REPEATED), oracle=fit_by_polyfit),
    Stage("a ValueError when all sizes are the same, or there is only one", _see_fit, SAME,
          oracle=fit_by_polyfit),
    mistakes=(
        Slip("The two are swapped: alpha (seconds a message) comes first.",
             (PAIR, "float(beta), float(alpha)")),
        Slip("That is the bandwidth, bytes per second. beta is seconds per byte: one over it.",
             (PAIR, "float(alpha), float(1 / beta)")),
        Slip("Return alpha, beta.", (PAIR, "float(beta)"), (PAIR, "float(alpha)")),
        Slip("beta is per byte, not per bit.", (PAIR, "float(alpha), float(beta) / 8")),
        Slip("The line need not go through 0: alpha is the time of an empty message.",
             (PAIR, "0.0, float((seconds / sizes).mean())")),
        Slip("alpha is less than the smallest time: that message has some bytes, too.",
             (PAIR, "float(seconds.min()), float(beta)")),
        Slip("If you divide the rows by the times, divide the right side, too: it is all ones "
             "then.", (ONES, "seconds")),
        Slip("A plain least squares sees only the largest message, and 10% of that is more than "
             "all of alpha. Divide each row by its time, so that errors count in proportion.",
             (ROWS, f"[{ONES}, sizes]", f"rows, {ONES}", "rows, seconds")),
        Slip("Divide each row by its time, not by a root of it.",
             (ROWS, "[seconds**-0.5, sizes * seconds**-0.5]", ONES, "seconds**0.5")),
        Slip("Divide each row by its time, not by its size: small messages would count too much.",
             (ROWS, f"[1 / sizes, {ONES}]", f"rows, {ONES}", "rows, seconds / sizes")),
        Slip("Use all points, not the first and the last alone.",
             (START, "    sizes, seconds = sizes[[0, -1]], seconds[[0, -1]]\n    rows =")),
        Slip("Two times of one size are two equations, and each of them counts: a dict or "
             "np.unique keeps one only.",
             (START, "    sizes, first = np.unique(sizes, return_index=True)\n"
              "    seconds = seconds[first]\n    rows ="),
             (START, "    sizes, seconds = map(np.array, zip(*dict(zip(sizes, seconds)).items()))\n"
              "    rows =")),
        Slip("Two different sizes are enough; the same one may come twice.",
             (DIFFERENT, "len(set(sizes.tolist())) < len(sizes)"),
             (DIFFERENT, "len(set(sizes.tolist())) < 3")),
        Slip("A time belongs to the size in the same place: do not sort one of the two.",
             ("np.asarray(sizes, float)", "np.sort(np.asarray(sizes, float))"),
             ("np.asarray(seconds, float)", "np.sort(np.asarray(seconds, float))")),
        Slip("np.asarray makes no copy of an array: write sizes / seconds into a new one, not "
             "sizes /= seconds.", (START, "    sizes /= seconds\n    rows =", ROWS,
                                   "[1 / seconds, sizes]")),
        Slip("Two unknowns need two different sizes: raise a ValueError.",
             (f"if {DIFFERENT}", "if False"), (DIFFERENT, "len(sizes) < 2")),
    ), hints=(
        "Each measurement is one equation in two unknowns: alpha + size * beta = time.",
        "numpy.linalg.lstsq solves many such equations at once. Divide each by its time first, or "
        "only the largest message counts.",
        "rows = np.stack([1 / seconds, sizes / seconds], axis=1); alpha, beta = "
        "np.linalg.lstsq(rows, np.ones(len(sizes)), rcond=None)[0]",
    ))


# --- crossover_bytes ------------------------------------------------------------------------------

class Links(NamedTuple):
    ranks: int
    alpha: float = ALPHA
    beta: float = BETA

    def __str__(self):
        return f"{count_ranks(self.ranks)}, alpha={self.alpha:g}, beta={self.beta:g}"


def _see_crossover(fn, case):
    yield {"the size": fn(*case) if case.ranks > 2 else outcome(ZeroDivisionError, fn, *case)}


def bytes_of_equal_times(ranks, alpha, beta):
    """Find where two straight lines meet: both times are linear in the bytes."""
    if ranks <= 2:
        return math.inf
    ahead, behind = (seconds_of_steps("ring", n, ranks, alpha, beta)
                     - seconds_of_steps("recursive_doubling", n, ranks, alpha, beta)
                     for n in (0, 1e9))
    return 1e9 * ahead / (ahead - behind)


EQUAL, IS_AHEAD = "more_steps * alpha / (more_bytes * beta)", "more_bytes > 0"
MORE_BYTES, MORE_STEPS = "swaps - 2 * (R - 1) / R", "2 * (R - 1) - swaps"
CROSSOVER = Proof(
    crossover_bytes,
    Stage("ring and doubling take equally long at that size: 4, 8, 64 ranks", _see_crossover,
          tuple(map(Links, (8, 4, 64))), oracle=bytes_of_equal_times),
    Stage("also when R is no power of two: 3, 6, 13 ranks", _see_crossover,
          tuple(Links(ranks, alpha=3, beta=2e-3) for ranks in (3, 6, 13)),
          oracle=bytes_of_equal_times),
    Stage("infinity on 1 and 2 ranks, where the ring never wins", _see_crossover,
          tuple(map(Links, (1, 2))), oracle=bytes_of_equal_times),
    mistakes=(
        Slip("From some size on the ring wins. Is the sign right? Doubling sends swaps times x, "
             "the ring 2 (R-1)/R times: which is more?", (MORE_BYTES, "2 * (R - 1) / R - swaps")),
        Slip("A size is positive: which of the two has more steps, and which more bytes?",
             (MORE_STEPS, "swaps - 2 * (R - 1)"),
             (MORE_BYTES, "2 * (R - 1) / R - swaps", IS_AHEAD, "more_bytes")),
        Slip("alpha / beta, not beta / alpha: seconds a message over seconds a byte is bytes.",
             (EQUAL, "more_steps * beta / (more_bytes * alpha)")),
        Slip("alpha / beta alone is where one message's latency and bytes cost the same. The ring "
             "pays several alphas more, and doubling several bytes more.", (EQUAL, "alpha / beta")),
        Slip("Divide by the bytes that doubling sends more, per byte of x.",
             (EQUAL, "more_steps * alpha / beta")),
        Slip("The steps that the ring has more: count doubling's, too.",
             (MORE_STEPS, "2 * (R - 1)")),
        Slip("The bytes that doubling sends more: the ring sends some, too.",
             (MORE_BYTES, "swaps")),
        Slip("The ring goes round twice: 2(R-1) steps, 2(R-1)/R of the bytes.",
             (MORE_STEPS, "R - 1 - swaps"), (MORE_BYTES, "swaps - (R - 1) / R"),
             (MORE_STEPS, "R - 1 - swaps", MORE_BYTES, "swaps - (R - 1) / R")),
        Slip("The ring sends 2(R-1)/R times x, not 2 times.", (MORE_BYTES, "swaps - 2")),
        Slip("Doubling swaps all of x in each round, no chunks.",
             (MORE_BYTES, "swaps / R - 2 * (R - 1) / R", IS_AHEAD, "more_bytes")),
        Slip("These are elements of 4 bytes; bytes are wanted.", (EQUAL, f"{EQUAL} / 4")),
        Slip("That is the size of one chunk, x / R; the size of x is wanted.",
             (EQUAL, f"{EQUAL} / R")),
        Slip("These are bits; bytes are wanted.", (EQUAL, f"{EQUAL} * 8")),
        Slip("When R is no power of two, doubling has one round more than ceil(log2 R).",
             (ODD_ROUNDS, "rounds"), ("math.ceil", "math.floor")),
        Slip("When R is no power of two, round log2 R up: there is no fraction of a round.",
             (CEIL, "math.log2(ranks)")),
        Slip("With 2 ranks doubling sends no more bytes than the ring and has fewer steps, so the "
             "ring never wins: math.inf.",
             ("else math.inf", "else 0"), ("else math.inf", "else None")),
        Slip("Mind the division by zero on 1 and 2 ranks: there doubling sends no more bytes than "
             "the ring, and the ring never wins. That is math.inf.",
             (f" if {IS_AHEAD} else math.inf", ""), (IS_AHEAD, "more_bytes >= 0")),
    ), hints=(
        "Write down the time of the ring and of doubling, and set them equal.",
        "The ring has more steps, doubling more bytes: (more steps) * alpha = n * (more bytes per "
        "byte of x) * beta.",
        "more_steps = 2 * (R - 1) - swaps; more_bytes = swaps - 2 * (R - 1) / R; return "
        "more_steps * alpha / (more_bytes * beta), or math.inf when more_bytes is not positive",
    ))
