"""RankConsensus: turn an error on one rank into an error on all, so that none waits in vain."""

import contextlib
import json

import torch


class RankConsensus:
    """Exchange values and errors between the ranks of a Parallel, using only its `gather`."""

    def __init__(self, parallel, device):
        self.parallel, self.device = parallel, device

    def exchange(self, value):
        """Gather the values of all ranks, on every rank: [rank 0's, rank 1's, ...].

        value: anything that JSON can represent.
        """
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        length = torch.tensor([len(text)], device=self.device)
        row = torch.full((int(self.parallel.gather(length).max()),), ord(" "), dtype=torch.uint8)
        row[: len(text)] = text
        rows = self.parallel.gather(row.to(self.device)).cpu()
        return [json.loads(row.numpy().tobytes()) for row in rows]

    @contextlib.contextmanager
    def agreed(self):
        """Raise on all ranks what one rank raises inside, so no rank waits for a failed one."""
        error = None
        try:
            yield
        except Exception as local_error:
            error = local_error
        messages = self.exchange(None if error is None else str(error) or type(error).__name__)
        if error is not None:
            raise error
        for rank, message in enumerate(messages):
            if message is not None:
                raise RuntimeError(f"rank {rank}: {message}")
