"""alpha and beta of a link, from measured times."""

import numpy as np


def fit_alpha_beta(sizes, seconds):
    """Fit (alpha, beta) so that alpha + size * beta is nearest to the measured `seconds`.

    Nearest in relative terms: least squares of the relative errors, so that 10% counts the same at
    1 KB and at 64 MB. Plain least squares would fit the largest message only, and alpha would be
    noise.
    The same size may occur several times.
    Raises: ValueError for fewer than two different sizes.
    Lab: 02
    """
    sizes, seconds = np.asarray(sizes, float), np.asarray(seconds, float)
    if len(set(sizes.tolist())) < 2:
        raise ValueError(f"a fit needs two different sizes or more, not {len(set(sizes.tolist()))}")
    rows = np.stack([1 / seconds, sizes / seconds], axis=1)  # alpha/t + beta*n/t should be 1
    alpha, beta = np.linalg.lstsq(rows, np.ones(len(sizes)), rcond=None)[0]
    return float(alpha), float(beta)
