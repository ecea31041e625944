"""Stop and go on: what a SIGTERM does to a run, and what a checkpoint must agree with."""

import signal


class StopSignal:
    """Inside the block a SIGTERM is only noted; the ranks then agree after which step to stop.

    A scheduler sends it before it takes the machine away, and never to all ranks in the same step:
    a rank that stopped by itself would leave the others waiting in an all-reduce.
    """

    def __init__(self):
        self.received = False  # by this rank
        self.agreed = False  # by all: set where they talk about it

    def note(self, *_):
        self.received = True

    def __enter__(self):
        self._before = signal.signal(signal.SIGTERM, self.note)
        return self

    def __exit__(self, *_):
        signal.signal(signal.SIGTERM, self._before)


class SameRun:
    """What must be alike before and after: else step 1,000 is not the same place in the data.
    A part of the checkpoint, like the optimizer: it can be saved and loaded.
    """

    def __init__(self, **what):
        self.what = what  # name -> number

    def state_dict(self):
        return self.what

    def load_state_dict(self, saved):
        differ = [f"{name}={saved.get(name)}, this run has {value}"
                  for name, value in self.what.items() if saved.get(name) != value]
        if differ:
            raise ValueError("the checkpoint is of another run: it has " + "; ".join(differ))
