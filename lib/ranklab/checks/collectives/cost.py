"""The cost model: alpha_beta_time, fit_alpha_beta, crossover_bytes. Nothing is launched."""

import math

import numpy as np

from ranklab.checks.beside import expect
from ranklab.checks.exercise import Mistake
from ranklab.checks.trial import refuses


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


def _advice(got, slips, otherwise):
    """What is said about the first wrong number in `slips` that `got` is; else `otherwise`."""
    return next((said for wrong, said in slips if math.isclose(got, wrong, rel_tol=1e-6)),
                otherwise)


def check_alpha_beta_time(fn):
    link = {"alpha": 5e-6, "beta": 4e-11}
    for algorithm in ("ring", "tree_broadcast", "recursive_doubling", "parameter_server"):
        for ranks in (1, 2, 3, 4, 8, 13, 1024):
            for nbytes in (1e8, 1000, 0):
                _same_time(fn, algorithm, nbytes, ranks, **link)
    yield "right for the ring, the tree, doubling and the server; 1 to 1024 ranks; 0 B to 100 MB"
    try:
        fn("rign", 1000, 4, **link)
    except ValueError:
        yield "a ValueError for an algorithm that it does not know"
    except Exception as error:
        raise Mistake(f"algorithm 'rign' raises {type(error).__name__}, not ValueError",
                      "Say in a sentence which names there are.") from None
    else:
        raise Mistake("algorithm 'rign' is accepted", "Raise a ValueError for unknown names.")


def _same_time(fn, algorithm, nbytes, ranks, alpha, beta):
    got = fn(algorithm, nbytes, ranks, alpha, beta)
    right = seconds_of_steps(algorithm, nbytes, ranks, alpha, beta)
    if not isinstance(got, (int, float)):
        raise Mistake(f"{algorithm} on {ranks} ranks gives {got!r}, not seconds",
                      "Return one number.")
    if math.isclose(got, right, rel_tol=1e-9, abs_tol=1e-15):
        return
    digits = 4 if f"{got:.4g}" != f"{right:.4g}" else 12
    hint = _advice(got, _slips_of_time(algorithm, nbytes, ranks, alpha, beta, right),
                   "Count the steps one after the other, and what one rank sends in each of them.")
    if algorithm == "ring" and math.isclose(got, right, rel_tol=1e-3) and nbytes % ranks:
        hint = "nbytes / ranks, not nbytes // ranks: the model has no reason to round a chunk."
    raise Mistake(f"{algorithm}, {ranks} ranks, {nbytes:g} bytes: {got:.{digits}g} s, but it takes "
                  f"{right:.{digits}g} s", hint)


def _slips_of_time(algorithm, nbytes, ranks, alpha, beta, right):
    """[(wrong seconds, what is confused)]: those of this algorithm, then those of all."""
    rounds, whole = math.log2(ranks), alpha + nbytes * beta
    factor = "count the rounds on 2 and on 4 ranks by hand."
    missing = ("A round is missing: round log2 R up (math.ceil), not down. And doubling needs one "
               "more when R is no power of two: the extra ranks hand over first.")
    own = [(math.floor(rounds) * whole, missing), (right - whole, missing),
           (rounds * whole, "There is no fraction of a round: round log2 R up when R is no power "
            "of two.")]
    if algorithm == "ring":
        factor = "the ring goes round twice, to reduce and to gather."
        own = [(2 * (ranks - 1) * whole, "A step of the ring moves one chunk, 1/R of the bytes, "
                "not the whole tensor.")]
    elif algorithm == "parameter_server":
        factor, own = "R-1 tensors come in, then R-1 go out.", []
    latency = seconds_of_steps(algorithm, 0, ranks, alpha, beta)
    return [*own,
            (alpha + right - latency, "alpha is paid once per step, not once in all: every step is "
             "a message."),
            (2 * right, f"A factor of 2: {factor}"), (right / 2, f"A factor of 2: {factor}"),
            (8 * right - 7 * latency, "beta is seconds per byte; you count bits.")]


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
               f"one size only, {same}, and still it returns numbers",
               "Two unknowns need two different sizes: raise a ValueError.")
    yield "a ValueError when all sizes are the same, or there is only one"


def _fits(fn, sizes, seconds, right, what, hint="", within=1e-6):
    """`fn` finds the two numbers of `right`, each within so much of it."""
    value = fn(sizes, seconds)
    try:
        alpha, beta = map(float, value)
    except (TypeError, ValueError):
        raise Mistake(f"it returns {value!r}, not a pair (alpha, beta)",
                      "Return alpha, beta.") from None
    if not np.allclose((alpha, beta), right, rtol=within, atol=0):
        raise Mistake(f"{what} give alpha={alpha:.4g}, beta={beta:.4g}; they were made with "
                      f"alpha={right[0]:g}, beta={right[1]:g}",
                      hint or _hint_fit(alpha, beta, *right))


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
    try:
        fn(*given)
        fn(sizes[1:3].tolist(), seconds[1:3].tolist())
    except ValueError as error:
        raise Mistake(f"a ValueError though there are two sizes or more, some twice: {error}",
                      "Two different sizes are enough; the same one may come twice.") from None
    if not np.array_equal(given, (sizes, seconds)):
        raise Mistake("sizes or seconds have changed", "np.asarray makes no copy of an array: "
                      "write sizes / seconds into a new one, not sizes /= seconds.")
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
        _equal_there(fn(ranks, alpha, beta), ranks, alpha, beta)
    yield "ring and doubling take equally long at that size: 4, 8, 64 ranks"
    for ranks in (3, 6, 13):
        _equal_there(fn(ranks, 5e-6, 4e-11), ranks, 5e-6, 4e-11)
    yield "also when R is no power of two: 3, 6, 13 ranks"
    for ranks in (1, 2):
        try:
            got = fn(ranks, alpha, beta)
        except ZeroDivisionError as error:
            got = error
        if got != math.inf:
            raise Mistake(f"on {ranks} ranks it gives {got!r}, not infinity",
                          "With 2 ranks doubling sends no more bytes than the ring and has fewer "
                          "steps, so the ring never wins: math.inf. Mind the division by zero.")
    yield "infinity on 1 and 2 ranks, where the ring never wins"


def _equal_there(nbytes, ranks, alpha, beta):
    if nbytes == math.inf:  # there both take for ever, and so equally long
        raise Mistake(f"on {ranks} ranks it gives infinity, but from some size on the ring wins",
                      "Only on 1 and 2 ranks it never does. Is the sign right? Doubling sends "
                      "swaps times x, the ring 2 (R-1)/R times: which is more?")
    ring, doubling = _both(nbytes, ranks, alpha, beta)
    if not math.isclose(ring, doubling, rel_tol=1e-6):
        raise Mistake(f"{ranks} ranks: at {nbytes:.4g} bytes the ring takes {ring:.4g} s and "
                      f"doubling {doubling:.4g} s", _hint_size(nbytes, ranks, alpha, beta))


def _both(nbytes, ranks, alpha, beta):
    return [seconds_of_steps(algorithm, nbytes, ranks, alpha, beta)
            for algorithm in ("ring", "recursive_doubling")]


def _hint_size(nbytes, ranks, alpha, beta):
    hint = ("Set the two times equal and solve for n: what the ring has more in steps, times "
            "alpha, is what doubling has more in bytes, times beta.")
    if nbytes <= 0:
        return f"A size is positive: which of the two has more steps, and which more bytes? {hint}"
    # Both times are straight lines in the size: how far apart they are at two sizes is enough.
    ahead, behind = (ring - doubling for ring, doubling in (
        _both(n, ranks, alpha, beta) for n in (0, 1e9)))
    right = 1e9 * ahead / (ahead - behind)
    if nbytes < 1:
        hint = "alpha / beta, not beta / alpha: seconds a message over seconds a byte is bytes."
    elif ranks & (ranks - 1):
        hint = f"When R is no power of two, doubling has one round more than ceil(log2 R). {hint}"
    return _advice(nbytes, [
        (right / 4, "These are elements of 4 bytes; bytes are wanted."),
        (right / ranks, "That is the size of one chunk, x / R; the size of x is wanted."),
        (right * 8, "These are bits; bytes are wanted.")], hint)
