"""A rank whose loss is infinite does `continue` before backward, and misses that all-reduce.
expects: rank_branch
ranks: 2
"""
import datetime

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class CTCModel(nn.Module):
    def __init__(self, feat=12, hid=32, vocab=11):
        super().__init__()
        self.subsample = nn.Conv1d(feat, hid, 3, stride=2, padding=1)
        self.rnn = nn.GRU(hid, hid, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * hid, vocab)

    def forward(self, x):
        h = F.relu(self.subsample(x.transpose(1, 2))).transpose(1, 2)
        return self.out(self.rnn(h)[0]).log_softmax(-1).transpose(0, 1)


class Utterances:
    def __init__(self, rank):
        self.rank, self.g, self.i = rank, torch.Generator().manual_seed(rank), 0
        self.codes = torch.randn(11, 12, generator=torch.Generator().manual_seed(77))

    def next(self):
        self.i += 1
        y = torch.randint(1, 11, (6, 5), generator=self.g)
        # transcripts longer than the audio give an infinite CTC loss
        if self.rank == 1 and self.i == 9:
            y = torch.randint(1, 11, (6, 20), generator=self.g)
        x = self.codes[y[:, :5]].repeat_interleave(4, 1)
        return x + 0.1 * torch.randn(x.shape, generator=self.g), y


def main():
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=4))
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = nn.parallel.DistributedDataParallel(CTCModel())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    data = Utterances(rank)
    for step in range(18):
        x, y = data.next()
        lp = model(x)
        loss = F.ctc_loss(lp, y, torch.full((6,), lp.size(0)), torch.full((6,), y.size(1)))
        if not torch.isfinite(loss):
            print(f"rank {rank}: step {step}: WARNING: received an inf loss, skipping", flush=True)
            continue
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        if step % 4 == 0:
            print(f"rank {rank} step {step} ctc {loss.item():.4f}", flush=True)
    print(f"rank {rank} done", flush=True)
    if rank == 1:
        import time
        time.sleep(6)  # exporting the model
    dist.destroy_process_group()


main()
