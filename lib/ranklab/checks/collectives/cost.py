"""The cost model: alpha_beta_time, fit_alpha_beta, crossover_bytes. Nothing is launched."""

import math

import numpy as np

from ranklab.checks.exercise import Mistake


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
    what = (f"{algorithm}, {ranks} ranks, {nbytes:g} bytes: {got:.{digits}g} s, but it takes "
            f"{right:.{digits}g} s")
    raise Mistake(what, _hint_time(algorithm, nbytes, ranks, alpha, beta, got, right))


def _hint_time(algorithm, nbytes, ranks, alpha, beta, got, right):
    def near(value):
        return math.isclose(got, value, rel_tol=1e-6)

    rounds = math.log2(ranks)
    if algorithm == "ring" and math.isclose(got, right, rel_tol=1e-3) and nbytes % ranks:
        return "nbytes / ranks, not nbytes // ranks: the model has no reason to round a chunk."
    if algorithm in ("tree_broadcast", "recursive_doubling"):
        if near(math.floor(rounds) * (alpha + nbytes * beta)):
            return ("A round is missing: round log2 R up (math.ceil), not down. And doubling needs "
                    "one more when R is no power of two: the extra ranks hand over first.")
        if near(rounds * (alpha + nbytes * beta)):
            return "There is no fraction of a round: round log2 R up when R is no power of two."
    bandwidth_part = right - (seconds_of_steps(algorithm, 0, ranks, alpha, beta))
    if near(alpha + bandwidth_part):
        return "alpha is paid once per step, not once in all: every step is a message."
    if near(2 * right) or near(right / 2):
        return {"ring": "A factor of 2: the ring goes round twice, to reduce and to gather.",
                "parameter_server": "A factor of 2: R-1 tensors come in, then R-1 go out.",
                }.get(algorithm, "A factor of 2: count the rounds on 2 and on 4 ranks by hand.")
    if near(right - bandwidth_part + 8 * bandwidth_part):
        return "beta is seconds per byte; you count bits."
    in_rounds = algorithm in ("tree_broadcast", "recursive_doubling")
    if in_rounds and near(right - (alpha + nbytes * beta)):
        return ("One round is missing. Round log2 R up; and doubling needs one more than that "
                "when R is no power of two, since the extra ranks hand over first.")
    if algorithm == "ring" and near(2 * (ranks - 1) * (alpha + nbytes * beta)):
        return "A step of the ring moves one chunk, 1/R of the bytes, not the whole tensor."
    return "Count the steps one after the other, and what one rank sends in each of them."


def check_fit_alpha_beta(fn):
    sizes = [1e3, 1e4, 1e5, 1e6, 1e7, 1e8]
    alpha, beta = 2e-5, 1e-9
    seconds = [alpha + beta * n for n in sizes]
    got = _pair(fn(sizes, seconds))
    for name, value, right in zip(("alpha", "beta"), got, (alpha, beta)):
        if not math.isclose(value, right, rel_tol=1e-6):
            raise Mistake(f"times that were made with {name}={right:g} give {name}={value:g}",
                          _hint_fit(got, alpha, beta))
    yield "finds alpha and beta again from exact times"
    noise = (1.1, 0.9, 1.1, 0.9, 1.1, 0.9)
    got = _pair(fn(sizes, [t * f for t, f in zip(seconds, noise)]))
    for name, value, right in zip(("alpha", "beta"), got, (alpha, beta)):
        if not math.isclose(value, right, rel_tol=0.07):
            raise Mistake(
                f"with 10% of noise on each time, {name}={value:.3g} where {right:g} is right",
                "A plain least squares sees only the largest message, and 10% of that is more "
                "than all of alpha. Divide each row by its time (not by its size, or by a root), "
                "so that errors count in proportion; and use all points, not two.")
    yield "10% of noise on each time moves neither by more than 7%"
    _any_order(fn, alpha, beta)
    yield "sizes in any order, some twice, or two of them alone"
    for sizes in ([1000, 1000], [1000], [1000, 1000, 1000]):
        try:
            fn(sizes, [1e-3, 1.1e-3, 1.2e-3][:len(sizes)])
        except ValueError:
            continue
        raise Mistake(f"one size only, {sizes}, and still it returns numbers",
                      "Two unknowns need two different sizes: raise a ValueError.")
    yield "a ValueError when all sizes are the same, or there is only one"


def _pair(value):
    try:
        alpha, beta = value
        return float(alpha), float(beta)
    except (TypeError, ValueError):
        raise Mistake(f"it returns {value!r}, not a pair (alpha, beta)",
                      "Return alpha, beta.") from None


def _any_order(fn, alpha, beta):
    """Sizes as one measures them: in any order, some twice, in the caller's arrays."""
    alpha, beta = alpha / 10, beta * 20  # other constants than before
    sizes = np.array([1e5, 1e5, 1e3, 1e7, 1e5])
    seconds = alpha + beta * sizes
    before = sizes.copy(), seconds.copy()
    try:
        got = _pair(fn(sizes, seconds))
        _pair(fn(sizes[1:3].tolist(), seconds[1:3].tolist()))
    except ValueError as error:
        raise Mistake(f"a ValueError though there are two sizes or more, some twice: {error}",
                      "Two different sizes are enough; the same one may come twice.") from None
    if not (np.array_equal(sizes, before[0]) and np.array_equal(seconds, before[1])):
        raise Mistake("sizes or seconds have changed", "np.asarray makes no copy of an array: "
                      "write sizes / seconds into a new one, not sizes /= seconds.")
    if not all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(got, (alpha, beta))):
        raise Mistake(f"sizes in any order, some twice, give alpha={got[0]:g}, "
                      f"beta={got[1]:g}; made with {alpha:g} and {beta:g}",
                      "A time belongs to the size in the same place: do not sort one of the two.")
    sizes = (1e3, 1e3, 1e6, 1e6)
    for noise in ((1.1, 0.9, 1.1, 0.9), (0.9, 1.1, 0.9, 1.1)):
        got = _pair(fn(sizes, [(alpha + beta * n) * f for n, f in zip(sizes, noise)]))
        if not all(math.isclose(a, b, rel_tol=0.07) for a, b in zip(got, (alpha, beta))):
            raise Mistake(f"sizes measured twice, 10% too slow and 10% too fast, give "
                          f"alpha={got[0]:.3g}, beta={got[1]:.3g}; right are {alpha:g} and "
                          f"{beta:g}", "Two times of one size are two equations, and each of them "
                          "counts: a dict or np.unique keeps one only.")


def _hint_fit(got, alpha, beta):
    if math.isclose(got[0], beta, rel_tol=1e-3) and math.isclose(got[1], alpha, rel_tol=1e-3):
        return "The two are swapped: alpha (seconds a message) comes first."
    if math.isclose(got[1] * beta, 1, rel_tol=1e-3):
        return "That is the bandwidth, bytes per second. beta is seconds per byte: one over it."
    return "Each time is one equation: alpha + size * beta = time. Solve for the two unknowns."


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
    ring = seconds_of_steps("ring", nbytes, ranks, alpha, beta)
    doubling = seconds_of_steps("recursive_doubling", nbytes, ranks, alpha, beta)
    if math.isclose(ring, doubling, rel_tol=1e-6):
        return
    hint = ("Set the two times equal and solve for n: what the ring has more in steps, times "
            "alpha, is what doubling has more in bytes, times beta.")
    if nbytes <= 0:
        hint = "A size is positive: which of the two has more steps, and which more bytes? " + hint
    elif math.isclose(nbytes * 4, _right(ranks, alpha, beta), rel_tol=1e-6):
        hint = "These are elements of 4 bytes; bytes are wanted."
    elif math.isclose(nbytes * ranks, _right(ranks, alpha, beta), rel_tol=1e-6):
        hint = "That is the size of one chunk, x / R; the size of x is wanted."
    elif math.isclose(nbytes / 8, _right(ranks, alpha, beta), rel_tol=1e-6):
        hint = "These are bits; bytes are wanted."
    elif nbytes < 1:
        hint = "alpha / beta, not beta / alpha: seconds a message over seconds a byte is bytes."
    elif ranks & (ranks - 1):
        hint = "When R is no power of two, doubling has one round more than ceil(log2 R). " + hint
    raise Mistake(f"{ranks} ranks: at {nbytes:.4g} bytes the ring takes {ring:.4g} s and doubling "
                  f"{doubling:.4g} s", hint)


def _right(ranks, alpha, beta):
    """Bisection on the two step-by-step times: no formula here either."""
    low, high = 0.0, 1e15
    for _ in range(200):
        middle = (low + high) / 2
        ring = seconds_of_steps("ring", middle, ranks, alpha, beta)
        doubling = seconds_of_steps("recursive_doubling", middle, ranks, alpha, beta)
        low, high = (middle, high) if doubling < ring else (low, middle)
    return low
