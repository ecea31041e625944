"""Resume: a stopped run goes on bit for bit, as if it had never stopped.

checkpoint/ does this for the course's trainer, on many ranks. Here you can see all state that
changes during training, in one process. baseline.checkpointing saves torch's random numbers.
"""

import copy
import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from ranklab.baseline.checkpointing import random_state, set_random_state


class Loader:
    """Make batches of positions 0 .. samples-1: in each epoch all of them, in a new order."""

    def __init__(self, samples, batch, seed=0):
        self.samples, self.batch = samples, batch
        self.generator = torch.Generator().manual_seed(seed)
        self.order, self.position = [], 0  # of this epoch; how many positions are used up

    def next(self):
        """Return the next positions; the last batch of an epoch may be smaller."""
        if self.position >= len(self.order):
            self.order = torch.randperm(self.samples, generator=self.generator).tolist()
            self.position = 0
        start, self.position = self.position, self.position + self.batch
        return self.order[start:self.position]


class Run:
    """A small classifier in training, with all the state of a real run.

    images (N, P) float32, labels (N,); `seed` sets the random numbers of all three libraries.
    These change from step to step: model, optimizer, scheduler, loader, steps_done, and random
    numbers (Python's change the brightness, NumPy's are noise, torch's drop activations).
    """

    def __init__(self, images, labels, batch=16, seed=0):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        self.images, self.labels = images, labels
        width, classes = images.shape[1], int(labels.max()) + 1
        self.model = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Dropout(0.1),
                                   nn.Linear(32, classes)).to(images.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / 20))
        self.loader = Loader(len(images), batch, seed)
        self.steps_done = 0

    def step(self):
        """Run one training step; return its loss."""
        at = self.loader.next()
        noise = torch.from_numpy(np.random.normal(0, 0.05, (len(at), self.images.shape[1])))
        x = self.images[at] * random.uniform(0.9, 1.1) + noise.to(self.images)
        loss = F.cross_entropy(self.model(x), self.labels[at])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.steps_done += 1
        return loss.item()


def resume_exact(run, saved=None):
    """Return all that the Run needs to resume from this moment, or put it back to `saved`.

    Without `saved`: change nothing. The result can be pickled, and later steps do not change it.
    With `saved`, which an earlier call returned: put the run back to that moment. Its next steps
    are bit-equal to the steps that followed it, even in a fresh process. A run can be put back to
    it any number of times.
    Run and Loader are given: look there for everything that changes in a step.
    Lab: 14
    """
    parts, loader = (run.model, run.optimizer, run.scheduler), run.loader
    if saved is None:
        # Copies: state_dict gives the tensors themselves, which the next step changes.
        return copy.deepcopy({
            "parts": [part.state_dict() for part in parts], "steps_done": run.steps_done,
            "loader": (loader.order, loader.position, loader.generator.get_state()),
            "random": (random.getstate(), np.random.get_state(), random_state())})
    saved = copy.deepcopy(saved)  # the optimizer would go on with the very tensors it is given
    for part, state in zip(parts, saved["parts"]):
        part.load_state_dict(state)
    run.steps_done = saved["steps_done"]
    loader.order, loader.position, rng = saved["loader"]
    loader.generator.set_state(rng)
    pythons, numpys, torchs = saved["random"]
    random.setstate(pythons)
    np.random.set_state(numpys)
    set_random_state(torchs)
