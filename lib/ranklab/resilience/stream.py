"""A packed stream: documents, shuffled and joined, in windows for any number of ranks.

resume.py's Loader keeps the order of its epoch and serves one process. Here each window depends
only on its number, so a checkpoint holds one number, from which any number of ranks can resume.
"""

from bisect import bisect_right
from itertools import accumulate

import torch

from ranklab.ranks import shard_range


class Documents:
    """Documents of tokens, as in a file with an index: lengths are known, and reads are recorded.

    documents[i] reads document i: its tokens, 1-D, int64.
    lengths: the number of tokens of each document; no document is read for it.
    read: the numbers of the documents that were read, in order.
    """

    def __init__(self, documents):
        self._tokens = [torch.as_tensor(tokens, dtype=torch.int64) for tokens in documents]
        self.lengths, self.read = [len(tokens) for tokens in self._tokens], []

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, number):
        self.read.append(number)
        return self._tokens[number]


class PackedStream:
    """Windows of one endless stream of documents, dealt out to any number of ranks.

    The stream is epoch 0, epoch 1, ... one after the other. An epoch is all documents, joined in
    the order torch.randperm(len(documents), generator=...), seeded with seed + epoch. Window k has
    the tokens k * window to (k + 1) * window of the stream: it may hold the end of one document,
    or of one epoch, and the beginning of the next. So each epoch has each token once.
    Step s has the windows s * batch to (s + 1) * batch, whatever the number of ranks. The ranks'
    shares differ by at most one window. There are at most `batch` ranks.
    documents: Documents; some may be empty, some longer than many windows.
    window: the number of tokens in a window, T + 1. batch: windows per step, over all ranks.
    Cost: nothing is sent. A rank reads a document at most once for each of its windows that needs
        it, and no other documents, even after a resume. The random states of torch, NumPy and
        Python are not changed.
    Lab: 14
    """

    def __init__(self, documents, window, batch, seed=0, rank=0, ranks=1):
        self.documents, self.window, self.batch, self.seed = documents, window, batch, seed
        self.rank, self.ranks, self.step = rank, ranks, 0
        self.total, self.cached = sum(documents.lengths), {}

    def next(self):
        """Return this rank's windows of the next step: (number of windows, window), int64."""
        rows, first = shard_range(self.batch, self.rank, self.ranks), self.step * self.batch
        self.step += 1
        return torch.stack([self._window(first + row) for row in rows])

    def state_dict(self):
        """Return what load_state_dict needs; change nothing.

        As JSON it has at most 100 bytes. It is the same on all ranks, so it is written only once.
        """
        return {"step": self.step}

    def load_state_dict(self, state):
        """Continue after the step at which `state` was taken, with any number of ranks.

        Documents, window, batch and seed are as they were. This stream may have advanced before.
        """
        self.step = state["step"]

    def _window(self, number):
        at, stop, pieces = number * self.window, (number + 1) * self.window, []
        while at < stop:
            epoch, offset = divmod(at, self.total)
            order, ends = self._epoch(epoch)
            place = bisect_right(ends, offset)  # the first document that ends behind `offset`
            tokens = self.documents[order[place]][offset - ends[place]:][:stop - at]
            pieces.append(tokens)
            at += len(tokens)
        return torch.cat(pieces)

    def _epoch(self, epoch):
        """Return (the documents' order, where each of them ends), of this epoch."""
        if epoch not in self.cached:
            random = torch.Generator().manual_seed(self.seed + epoch)
            order = torch.randperm(len(self.documents), generator=random).tolist()
            ends = [*accumulate(self.documents.lengths[i] for i in order)]
            self.cached = {epoch: (order, ends)}
        return self.cached[epoch]


def windows_again(taken, before, after):
    """Return the number of windows trained on twice if each rank skips what one rank has taken.

    taken: windows of each of the `before` ranks; below 0: windows that are never trained on.
    """
    return taken * before - taken * after
