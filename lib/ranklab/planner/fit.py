"""fit: the constants for which predicted step times are nearest to the published ones.

Damped least squares (Levenberg and Marquardt) on log(predicted / published), with derivatives by
finite differences. An error above 15% counts linearly, not by its square (Huber). In a source with
many rows each row counts less: n rows together weigh as much as the square root of n. A change of
variable enforces the bounds; its midpoint is the present value.
"""

import dataclasses
import math
from collections import Counter

import numpy as np

from ranklab.planner.constants import CONSTANTS, bounds
from ranklab.planner.score import memory_ratio, step_ratio

HUBER = 0.15
MEMORY = ("context_bytes", "gaps")  # all others belong to step_time


def fit(jobs, start=CONSTANTS, steps=30):
    """Return the Constants that fit the step times and the memory of these Jobs."""
    times = tuple(name for name in bounds() if name not in MEMORY)
    constants = fit_one([job for job in jobs if job.seconds], step_ratio, times, start, steps)
    return fit_one([job for job in jobs if job.memory], memory_ratio, MEMORY, constants, steps)


def fit_one(jobs, ratio, names, start, steps=30):
    """Return the Constants for which the ratios of these Jobs are nearest to 1; only `names` move.
    """
    if not jobs:
        return start
    weights = weights_of(jobs)
    place, damping = to_free(start, names), 1e-2
    errors = residuals(jobs, ratio, from_free(place, names, start))
    for _ in range(steps):
        slope = derivatives(jobs, ratio, place, names, start, errors)
        robust = weights / np.maximum(1.0, np.abs(errors) / HUBER)
        matrix = slope.T @ (slope * robust[:, None])
        matrix += 1e-3 * np.eye(len(names))  # a constant that no row needs stays where it is
        gradient = slope.T @ (robust * errors) + 1e-3 * place
        for _ in range(8):
            trial = place - np.linalg.solve(matrix + damping * np.diag(np.diag(matrix)), gradient)
            trial = np.clip(trial, -4, 4)
            trial_errors = residuals(jobs, ratio, from_free(trial, names, start))
            if cost(trial_errors, trial, weights) < cost(errors, place, weights):
                break
            damping *= 4
        else:
            break
        gain = cost(errors, place, weights) - cost(trial_errors, trial, weights)
        place, errors, damping = trial, trial_errors, damping / 3
        if gain < 1e-6 * cost(errors, place, weights):
            break
    return from_free(place, names, start)


def weights_of(jobs):
    """Return the weight of each Job: n rows of a source together weigh the square root of n.
    """
    count = Counter(job.source for job in jobs)
    return np.array([1 / math.sqrt(count[job.source]) for job in jobs])


def cost(errors, place, weights):
    """Return the objective of the fit: Huber's sum, and a small penalty for each move."""
    size = np.abs(errors)
    huber = np.where(size < HUBER, size**2 / 2, HUBER * (size - HUBER / 2))
    return float(weights @ huber) + 0.5e-3 * float(place @ place)


def residuals(jobs, ratio, constants):
    """Return log(predicted / published) of each Job."""
    return np.array([math.log(ratio(job, constants)) for job in jobs])


def derivatives(jobs, ratio, place, names, start, errors, delta=1e-3):
    """Return the derivative of each error by each free number: (jobs, names), by differences."""
    columns = []
    for index in range(len(names)):
        point = place.copy()
        point[index] += delta
        columns.append((residuals(jobs, ratio, from_free(point, names, start)) - errors) / delta)
    return np.stack(columns, axis=1)


def to_free(constants, names):
    """Return each constant as a free number, whose logistic function lies between the bounds."""
    limits = bounds()
    parts = [(getattr(constants, name) - limits[name][0]) / (limits[name][1] - limits[name][0])
             for name in names]
    parts = np.clip(parts, 0.02, 0.98)
    return np.log(parts / (1 - parts))


def from_free(place, names, start):
    """Return the Constants at these free numbers; all but `names` are taken from `start`."""
    limits, values = bounds(), {}
    for name, number in zip(names, place):
        low, high, _ = limits[name]
        values[name] = float(low + (high - low) / (1 + math.exp(-number)))
    return dataclasses.replace(start, **values)
