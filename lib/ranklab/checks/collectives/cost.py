"""The cost model: alpha_beta_time, fit_alpha_beta, crossover_bytes. Nothing is launched."""

import math

import numpy as np

from ranklab.checks.beside import expect
from ranklab.checks.trial import explain, refuses
from ranklab.engine.report import count_ranks


def seconds_of_steps(algorithm, nbytes, ranks, alpha, beta):
    """The oracle: goes through the algorithm step by step and adds up, with no formula."""
    if algorithm == "ring":
        steps = [nbytes / ranks for _ in ("reduce", "gather") for _ in range(ranks - 1)]
    elif algorithm == "parameter_server":
        steps = [nbytes for _ in ("in", "out") for _ in range(ranks - 1)]
    else:
        steps, have = [], 1
        while have < ranks:
            steps, have = [*steps, nbytes], 2 * have
        if algorithm == "recursive_doubling" and have != ranks:
            steps.append(nbytes)
    return sum(alpha + n * beta for n in steps)


def check_alpha_beta_time(fn):
    link = 5e-6, 4e-11
    for algorithm in ("ring", "tree_broadcast", "recursive_doubling", "parameter_server"):
        for ranks in (1, 2, 3, 4, 8, 13, 1024):
            for nbytes in (1e8, 1000, 0):
                case = algorithm, nbytes, ranks, *link
                explain(f"{algorithm}, {count_ranks(ranks)}, {nbytes:g} bytes: the time", fn(*case),
                        seconds_of_steps(*case), _slips_of_time(*case), "Count the steps one after "
                        "the other, and what one rank sends in each of them.")
    yield "right for the ring, the tree, doubling and the server; 1 to 1024 ranks; 0 B to 100 MB"
    try:
        got = fn("rign", 1000, 4, *link)
    except Exception as error:
        got = error
    expect(isinstance(got, ValueError), f"algorithm 'rign' gives {got!r}, not a ValueError",
           "Raise a ValueError for unknown names. Say in a sentence which names there are.")
    yield "a ValueError for an algorithm that it does not know"


def _slips_of_time(algorithm, nbytes, ranks, alpha, beta):
    """{what a mistake gets: (seconds, hint)}: those of this algorithm, then those of all."""
    right, latency = (seconds_of_steps(algorithm, n, ranks, alpha, beta) for n in (nbytes, 0))
    rounds, steps, whole = math.log2(ranks), 2 * (ranks - 1), alpha + nbytes * beta
    factor, named = "R-1 tensors come in, then R-1 go out.", {}
    if algorithm == "ring":
        factor = "the ring goes round twice, to reduce and to gather."
        named = {"with the whole tensor in each step": (steps * whole, "A step of the ring moves "
                                                        "one chunk, 1/R of the bytes."),
                 "with whole bytes in a chunk": (
                     steps * (alpha + nbytes // ranks * beta), "nbytes / ranks, not nbytes // "
                     "ranks: the model has no reason to round a chunk.")}
    elif algorithm != "parameter_server":
        factor = "count the rounds on 2 and on 4 ranks by hand."
        missing = ("A round is missing: round log2 R up (math.ceil), not down. And doubling needs "
                   "one more when R is no power of two: the extra ranks hand over first.")
        named = {"with log2 R rounded down": (math.floor(rounds) * whole, missing),
                 "one round short": (right - whole, missing),
                 "with a part of a round": (rounds * whole, "There is no fraction of a round: "
                                            "round log2 R up when R is no power of two.")}
    return named | {
        "with one alpha": (alpha + right - latency, "alpha is paid once per step, not once in all: "
                           "every step is a message."),
        "twice what is right": (2 * right, f"A factor of 2: {factor}"),
        "half of what is right": (right / 2, f"A factor of 2: {factor}"),
        "with 8 beta": (8 * right - 7 * latency, "beta is seconds per byte; you count bits.")}


def check_fit_alpha_beta(fn):
    alpha, beta = 2e-5, 1e-9
    sizes = np.array([1e3, 1e4, 1e5, 1e6, 1e7, 1e8])
    seconds = alpha + beta * sizes
    _fits(fn, sizes.tolist(), seconds.tolist(), (alpha, beta), "exact times")
    yield "finds alpha and beta again from exact times"
    noisy = seconds * [1.1, 0.9, 1.1, 0.9, 1.1, 0.9]
    _fits(fn, sizes.tolist(), noisy.tolist(), (alpha, beta), "times with 10% of noise",
          "A plain least squares sees only the largest message, and 10% of that is more than all "
          "of alpha. Divide each row by its time (not by its size, or by a root), so that errors "
          "count in proportion; and use all points, not two.", within=0.07)
    yield "10% of noise on each time moves neither by more than 7%"
    _any_order(fn, alpha / 10, beta * 20)  # other constants than before
    yield "sizes in any order, some twice, or two of them alone"
    for same in ([1000, 1000], [1000], [1000, 1000, 1000]):
        expect(refuses(fn, same, [1e-3, 1.1e-3, 1.2e-3][:len(same)]),
               f"there is only one size, {same}, and still it returns numbers",
               "Two unknowns need two different sizes: raise a ValueError.")
    yield "a ValueError when all sizes are the same, or there is only one"


def _fits(fn, sizes, seconds, right, what, hint="", within=1e-6):
    """`fn` finds the two numbers of `right`, each within so much of it."""
    value = fn(sizes, seconds)
    expect(np.size(value) == 2, f"it returns {value!r}, not a pair (alpha, beta)",
           "Return alpha, beta.")
    alpha, beta = np.ravel(value)
    expect(np.allclose((alpha, beta), right, rtol=within, atol=0),
           f"{what} give alpha={alpha:.4g}, beta={beta:.4g}; they were made with "
           f"alpha={right[0]:g}, beta={right[1]:g}", hint or _hint_fit(alpha, beta, *right))


def _hint_fit(alpha, beta, right_alpha, right_beta):
    if np.allclose((alpha, beta), (right_beta, right_alpha), rtol=1e-3, atol=0):
        return "The two are swapped: alpha (seconds a message) comes first."
    if math.isclose(beta * right_beta, 1, rel_tol=1e-3):
        return "That is the bandwidth, bytes per second. beta is seconds per byte: one over it."
    return "Each time is one equation: alpha + size * beta = time. Solve for the two unknowns."


def _any_order(fn, alpha, beta):
    """Sizes as one measures them: in any order, some twice, in the caller's arrays."""
    sizes = np.array([1e5, 1e5, 1e3, 1e7, 1e5])
    seconds = alpha + beta * sizes
    given = sizes.copy(), seconds.copy()
    two = sizes[1:3].tolist(), seconds[1:3].tolist()
    expect(not refuses(fn, *given) and not refuses(fn, *two), "a ValueError though there are two "
           "sizes or more, some twice", "Two different sizes are enough; the same one may come "
           "twice.")
    expect(np.array_equal(given, (sizes, seconds)), "sizes or seconds have changed",
           "np.asarray makes no copy of an array: write sizes / seconds into a new one, not "
           "sizes /= seconds.")
    _fits(fn, sizes, seconds, (alpha, beta), "sizes in any order, some twice,",
          "A time belongs to the size in the same place: do not sort one of the two.")
    twice = np.array([1e3, 1e3, 1e6, 1e6])
    for noise in ((1.1, 0.9, 1.1, 0.9), (0.9, 1.1, 0.9, 1.1)):
        _fits(fn, twice.tolist(), ((alpha + beta * twice) * noise).tolist(), (alpha, beta),
              "sizes measured twice, 10% too slow and 10% too fast,", "Two times of one size are "
              "two equations, and each of them counts: a dict or np.unique keeps one only.",
              within=0.07)


def check_crossover_bytes(fn):
    alpha, beta = 2e-5, 1e-9
    for ranks in (8, 4, 64):  # 8 first: a quarter of the bytes is no chunk there
        _equal_there(fn, ranks, alpha, beta)
    yield "ring and doubling take equally long at that size: 4, 8, 64 ranks"
    for ranks in (3, 6, 13):
        _equal_there(fn, ranks, 5e-6, 4e-11)
    yield "also when R is no power of two: 3, 6, 13 ranks"
    for ranks in (1, 2):
        try:
            got = fn(ranks, alpha, beta)
        except ZeroDivisionError as error:
            got = error
        expect(got == math.inf, f"on {ranks} ranks it gives {got!r}, not infinity",
               "With 2 ranks doubling sends no more bytes than the ring and has fewer steps, so "
               "the ring never wins: math.inf. Mind the division by zero.")
    yield "infinity on 1 and 2 ranks, where the ring never wins"


def _equal_there(fn, ranks, alpha, beta):
    right, short = (_equal_at(algorithm, ranks, alpha, beta)
                    for algorithm in ("recursive_doubling", "tree_broadcast"))
    explain(f"{ranks} ranks: the size", fn(ranks, alpha, beta), right, {
        "infinity": (math.inf, "From some size on the ring wins. Is the sign right? Doubling sends "
                     "swaps times x, the ring 2 (R-1)/R times: which is more?"),
        "negative": (-right, "A size is positive: which of the two has more steps, and which more "
                     "bytes?"),
        "upside down": (right * (beta / alpha) ** 2, "alpha / beta, not beta / alpha: seconds a "
                        "message over seconds a byte is bytes."),
        "with a round too few": (short, "When R is no power of two, doubling has one round more "
                                 "than ceil(log2 R)."),
        "a quarter of what is right": (right / 4, "These are elements of 4 bytes; bytes are "
                                       "wanted."),
        "that of one chunk": (right / ranks, "That is the size of one chunk, x / R; the size of x "
                              "is wanted."),
        "8 times what is right": (right * 8, "These are bits; bytes are wanted."),
    }, "Set the two times equal and solve for n: the ring's extra steps, times alpha, cost as much "
       "as doubling's extra bytes, times beta.")


def _equal_at(algorithm, ranks, alpha, beta):
    """The size at which `algorithm` takes as long as the ring: both times are straight lines."""
    ahead, behind = (seconds_of_steps("ring", n, ranks, alpha, beta)
                     - seconds_of_steps(algorithm, n, ranks, alpha, beta) for n in (0, 1e9))
    return 1e9 * ahead / (ahead - behind)
