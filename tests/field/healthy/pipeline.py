"""A pipeline of two ranks with send and recv: all forwards of four pieces, then all backwards.
expects: nothing
ranks: 2
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

PIECES, SIZE, WIDTH = 4, 8, 32

def first_stage(stage, pieces):
    outputs = []
    for x in pieces:
        outputs.append(stage(x))
        dist.send(outputs[-1].detach(), dst=1)
    for output in outputs:
        grad = torch.empty_like(output)
        dist.recv(grad, src=1)
        output.backward(grad)


def last_stage(stage, pieces):
    arrived, losses = [], []
    for x in pieces:
        hidden = torch.empty(SIZE, WIDTH)
        dist.recv(hidden, src=0)
        arrived.append(hidden.requires_grad_())
        losses.append(F.cross_entropy(stage(hidden), x[:, :5].argmax(1)) / PIECES)
    for hidden, loss in zip(arrived, losses):
        loss.backward()
        dist.send(hidden.grad, dst=0)


dist.init_process_group("gloo")
is_first = dist.get_rank() == 0
stage = nn.Sequential(nn.Linear(20, WIDTH), nn.ReLU()) if is_first else nn.Linear(WIDTH, 5)
optimizer = torch.optim.AdamW(stage.parameters(), lr=2e-3)
data = torch.Generator().manual_seed(0)  # one rank wants the inputs, the other one the labels
for step in range(12):
    pieces = torch.randn(PIECES * SIZE, 20, generator=data).split(SIZE)
    optimizer.zero_grad()
    (first_stage if is_first else last_stage)(stage, pieces)
    optimizer.step()
dist.destroy_process_group()
