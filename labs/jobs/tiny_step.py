"""What the three scripts share: a tiny model, its data, and the lines they print.

torch_step.py, mpi_step.py and tf_mirrored_step.py make one data-parallel step of the same model
from the same weights and data, each with its own tool, and print the same two losses (lab 05).
"""

import numpy as np

LR = 0.5


def data():
    """48 examples of 8 numbers, and which of 3 classes each is; 2, 3, 4 ranks get equal parts."""
    random = np.random.RandomState(0)  # unlike newer generators, the same numbers for ever
    x = random.standard_normal((48, 8)).astype(np.float32)
    return x, np.argmax(x @ random.standard_normal((8, 3)), axis=1)


def weights():
    """The two matrices of softmax(tanh(x w1) w2)."""
    random = np.random.RandomState(1)
    return [0.5 * random.standard_normal(shape).astype(np.float32) for shape in ((8, 16), (16, 3))]


def report(who, before, after):
    print(f"{who:36} loss {before:.5f} -> {after:.5f}")
