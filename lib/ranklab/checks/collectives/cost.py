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
        Slip("alpha is paid once per step, not once overall: every step is a message.",
             (STEPS, "alpha + steps * step_bytes * beta")),
        Slip("Every step also pays alpha.", (STEPS, "steps * step_bytes * beta")),
        Slip("alpha and beta are swapped: alpha is paid per message, beta per byte.",
             (STEPS, "steps * (beta + step_bytes * alpha)")),
        Slip("beta is seconds per byte; you count bits.",
             (STEPS, "steps * (alpha + 8 * step_bytes * beta)")),
        Slip("beta is seconds per byte, one over the bandwidth: multiply by it.",
             (STEPS, "steps * (alpha + step_bytes / beta)")),
        Slip("The chunks go round the ring twice, once to reduce and once to gather.",
             (RING, "(R - 1, nbytes / R)")),
        Slip("Each time round the ring is R-1 steps: a chunk need not come back to where it began.",
             (RING, "(2 * R, nbytes / R)")),
        Slip("A step of the ring moves one chunk, 1/R of the bytes.",
             (RING, "(2 * (R - 1), nbytes)")),
        Slip("Use nbytes / ranks for the ring, not nbytes // ranks: the model has no reason to "
             "round a chunk.", (RING, "(2 * (R - 1), nbytes // R)")),
        Slip("At the server, R-1 tensors come in, then R-1 go out.", (SERVER, "(R - 1, nbytes),")),
        Slip("The server already has its own x: only R-1 workers send theirs, not R.",
             (SERVER, "(2 * R, nbytes),")),
        Slip("All workers share the server's one link: their R-1 tensors arrive one after another, "
             "and the R-1 answers leave one after another.", (SERVER, "(2, nbytes),")),
        Slip("The server receives and sends whole tensors, not chunks.",
             (SERVER, "(2 * (R - 1), nbytes / R),")),
        Slip("The number of rounds can't be fractional: round log2 R up when R is not a power of "
             "two.",
             (CEIL, "math.log2(ranks)")),
        Slip("A round is missing: round log2 R up (math.ceil), not down.",
             ("math.ceil", "math.floor")),
        Slip("Each round doubles the number of ranks that have the value: use log2, not ln.",
             ("math.log2", "math.log")),
        Slip("Doubling needs one more step when R is not a power of two: the extra ranks hand over "
             "their x first.", (ODD_ROUNDS, "rounds")),
        Slip("Doubling needs one more step only when R is not a power of two.",
             (ODD_ROUNDS, "rounds + 1")),
        Slip("Only doubling needs an extra step when R is not a power of two. In a broadcast, no "
             "rank has to hand over its x first.", (TREE, "(swaps, nbytes)")),
        Slip("In the tree, every rank that has the value sends in each round, so their number "
             "doubles: it takes ceil(log2 R) rounds, not R-1.", (TREE, "(R - 1, nbytes)")),
        Slip("A tree's rounds all go one way: a broadcast has nothing to send back.",
             (TREE, "(2 * rounds, nbytes)")),
        Slip("In a swap both ranks send at the same time: it is one step, not two.",
             (SWAPS, "(2 * swaps, nbytes)")),
        Slip("Doubling swaps whole tensors, not chunks.", (SWAPS, "(swaps, nbytes / R)")),
        Slip("The tree sends whole tensors, not chunks.", (TREE, "(rounds, nbytes / R)")),
        Slip("Raise a ValueError for an unknown name, with a message that lists the known names.",
             (KNOWN, "if False and algorithm not in"),
             (KNOWN, "if False and algorithm not in", "costs[algorithm]",
              'costs.get(algorithm, costs["ring"])')),
    ), hints=(
        "For each algorithm, how many steps follow one another, and how many bytes are in each?",
        "Ring: 2(R-1) steps of nbytes/R. Server: 2(R-1) steps of nbytes. Tree: ceil(log2 R) steps "
        "of nbytes. Doubling: like the tree, plus one step if R is not a power of two.",
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
    is_pair = _is_pair(pair)
    is_as_before = all(map(np.array_equal, (sizes, seconds), case.measurements()))
    yield {"what it returns": "a pair (alpha, beta)" if is_pair else pair,
           **(_errors(case, *np.ravel(pair).astype(float)) if is_pair else {}),
           "sizes and seconds afterwards": "as before" if is_as_before else "changed"}


def _is_pair(value):
    try:
        values = np.ravel(value)
        return values.astype(float).size == 2 and not any(isinstance(x, str) for x in values)
    except (TypeError, ValueError, RuntimeError):  # no numbers, or rows of several lengths
        return False


def _errors(case, alpha, beta):
    """Return the error of each in percent."""
    says = (f"give alpha={alpha:.4g}, beta={beta:.4g}; they were made with alpha={case.alpha:g}, "
            f"beta={case.beta:g}, and {{1:g}}% more or less is allowed")
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
REPEATED = tuple(UNSORTED._replace(name=f"sizes measured twice, {errors}", sizes=TWICE,
                                   noise=noise, error=7, as_arrays=False)
                 for errors, noise in (("10% too slow, then 10% too fast", (1.1, 0.9) * 2),
                                       ("10% too fast, then 10% too slow", (0.9, 1.1) * 2)))
SAME = tuple(Measured(f"one size only, {[1000] * n}", (1e3,) * n, (1.0, 1.1, 1.2)[:n])
             for n in (2, 1, 3))
ROWS, ONES, DIFFERENT = ("[1 / seconds, sizes / seconds]", "np.ones(len(sizes))",
                         "len(set(sizes.tolist())) < 2")
PAIR, START = "float(alpha), float(beta)", "    rows ="
FIT = Proof(
    fit_alpha_beta,
    Stage("recovers alpha and beta from exact times", _see_fit,
          (Measured("exact times", SIZES),), oracle=fit_by_polyfit),
    Stage("10% of noise on each time moves neither by more than 7%", _see_fit, (NOISY,),
          oracle=fit_by_polyfit),
    Stage("sizes in any order, some twice, or two of them alone", _see_fit,
          (UNSORTED, UNSORTED._replace(name="two sizes", sizes=(1e5, 1e3), as_arrays=False),
           *REPEATED), oracle=fit_by_polyfit),
    Stage("a ValueError when all sizes are the same, or there is only one", _see_fit, SAME,
          oracle=fit_by_polyfit),
    mistakes=(
        Slip("The two are swapped: alpha (seconds per message) comes first.",
             (PAIR, "float(beta), float(alpha)")),
        Slip("That is the bandwidth, in bytes per second. beta is its inverse, seconds per byte.",
             (PAIR, "float(alpha), float(1 / beta)")),
        Slip("Return both: alpha, beta.", (PAIR, "float(beta)"), (PAIR, "float(alpha)")),
        Slip("beta is per byte, not per bit.", (PAIR, "float(alpha), float(beta) / 8")),
        Slip("The line need not go through 0: alpha is the time of an empty message.",
             (PAIR, "0.0, float((seconds / sizes).mean())")),
        Slip("alpha is less than the smallest time, because even that message carries some bytes.",
             (PAIR, "float(seconds.min()), float(beta)")),
        Slip("If you divide the rows by the times, divide the right-hand side as well: it becomes "
             "all ones.", (ONES, "seconds")),
        Slip("Plain least squares sees only the largest message, and 10% of its time is more than "
             "all of alpha. Divide each row by its time, so that relative errors count.",
             (ROWS, f"[{ONES}, sizes]", f"rows, {ONES}", "rows, seconds")),
        Slip("Divide each row by its time, not by the square root of its time.",
             (ROWS, "[seconds**-0.5, sizes * seconds**-0.5]", ONES, "seconds**0.5")),
        Slip("Divide each row by its time, not by its size, which gives small messages too much "
             "weight.",
             (ROWS, f"[1 / sizes, {ONES}]", f"rows, {ONES}", "rows, seconds / sizes")),
        Slip("Use all the points, not just the first and the last.",
             (START, "    sizes, seconds = sizes[[0, -1]], seconds[[0, -1]]\n    rows =")),
        Slip("Two times for the same size are two equations, and both count: a dict or np.unique "
             "keeps only one.",
             (START, "    sizes, first = np.unique(sizes, return_index=True)\n"
              "    seconds = seconds[first]\n    rows ="),
             (START, "    sizes, seconds = map(np.array, zip(*dict(zip(sizes, seconds)).items()))\n"
              "    rows =")),
        Slip("Two different sizes are enough; a size can occur more than once.",
             (DIFFERENT, "len(set(sizes.tolist())) < len(sizes)"),
             (DIFFERENT, "len(set(sizes.tolist())) < 3")),
        Slip("Each time belongs to the size at the same index: do not sort just one of the two.",
             ("np.asarray(sizes, float)", "np.sort(np.asarray(sizes, float))"),
             ("np.asarray(seconds, float)", "np.sort(np.asarray(seconds, float))")),
        Slip("np.asarray does not copy an array: put sizes / seconds into a new array, since sizes "
             "/= seconds overwrites the caller's.",
             (START, "    sizes /= seconds\n    rows =", ROWS,
                                   "[1 / seconds, sizes]")),
        Slip("Two unknowns need at least two different sizes: with fewer, raise a ValueError.",
             (f"if {DIFFERENT}", "if False"), (DIFFERENT, "len(sizes) < 2")),
    ), hints=(
        "Each measurement is one equation in two unknowns: alpha + size * beta = time.",
        "numpy.linalg.lstsq solves many such equations at once. Divide each equation by its time "
        "first; otherwise only the largest message counts.",
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
    Stage("ring and doubling take the same time at that size: 4, 8, 64 ranks", _see_crossover,
          tuple(map(Links, (8, 4, 64))), oracle=bytes_of_equal_times),
    Stage("also when R is not a power of two: 3, 6, 13 ranks", _see_crossover,
          tuple(Links(ranks, alpha=3, beta=2e-3) for ranks in (3, 6, 13)),
          oracle=bytes_of_equal_times),
    Stage("infinity on 1 and 2 ranks, where the ring never wins", _see_crossover,
          tuple(map(Links, (1, 2))), oracle=bytes_of_equal_times),
    mistakes=(
        Slip("Above some size the ring wins. Is your sign right? Doubling sends x `swaps` times, "
             "the ring 2 (R-1)/R times: which is more?", (MORE_BYTES, "2 * (R - 1) / R - swaps")),
        Slip("A size must be positive: which of the two has more steps, and which sends more "
             "bytes?",
             (MORE_STEPS, "swaps - 2 * (R - 1)"),
             (MORE_BYTES, "2 * (R - 1) / R - swaps", IS_AHEAD, "more_bytes")),
        Slip("Use alpha / beta, not beta / alpha: seconds per message over seconds per byte gives "
             "bytes.",
             (EQUAL, "more_steps * beta / (more_bytes * alpha)")),
        Slip("alpha / beta is only the size at which one message's latency and bytes cost the "
             "same. The ring pays several extra alphas, and doubling sends extra bytes.",
             (EQUAL, "alpha / beta")),
        Slip("Divide by the extra bytes that doubling sends per byte of x.",
             (EQUAL, "more_steps * alpha / beta")),
        Slip("Count only the ring's extra steps: doubling has some of its own.",
             (MORE_STEPS, "2 * (R - 1)")),
        Slip("Count only doubling's extra bytes: the ring sends some of its own.",
             (MORE_BYTES, "swaps")),
        Slip("The ring goes round twice: 2(R-1) steps, and 2(R-1)/R of the bytes.",
             (MORE_STEPS, "R - 1 - swaps"), (MORE_BYTES, "swaps - (R - 1) / R"),
             (MORE_STEPS, "R - 1 - swaps", MORE_BYTES, "swaps - (R - 1) / R")),
        Slip("The ring sends 2(R-1)/R times x, not 2 times.", (MORE_BYTES, "swaps - 2")),
        Slip("Doubling swaps all of x in each round, not chunks of it.",
             (MORE_BYTES, "swaps / R - 2 * (R - 1) / R", IS_AHEAD, "more_bytes")),
        Slip("That is a number of 4-byte elements: return bytes.", (EQUAL, f"{EQUAL} / 4")),
        Slip("That is the size of one chunk, x / R: return the size of x.",
             (EQUAL, f"{EQUAL} / R")),
        Slip("That is a number of bits: return bytes.", (EQUAL, f"{EQUAL} * 8")),
        Slip("When R is not a power of two, doubling needs one round more than ceil(log2 R).",
             (ODD_ROUNDS, "rounds"), ("math.ceil", "math.floor")),
        Slip("When R is not a power of two, round log2 R up: there are no fractional rounds.",
             (CEIL, "math.log2(ranks)")),
        Slip("With 1 or 2 ranks the ring never wins: doubling sends no more bytes, in no more "
             "steps. Return math.inf.",
             ("else math.inf", "else 0"), ("else math.inf", "else None")),
        Slip("Avoid dividing by zero on 1 and 2 ranks: doubling sends no more bytes than the ring "
             "there, so the ring never wins. Return math.inf.",
             (f" if {IS_AHEAD} else math.inf", ""), (IS_AHEAD, "more_bytes >= 0")),
    ), hints=(
        "Write down the times of the ring and of doubling, and set them equal.",
        "The ring has more steps, doubling more bytes: (more steps) * alpha = n * (more bytes per "
        "byte of x) * beta.",
        "more_steps = 2 * (R - 1) - swaps; more_bytes = swaps - 2 * (R - 1) / R; return "
        "more_steps * alpha / (more_bytes * beta), or math.inf when more_bytes is not positive",
    ))
