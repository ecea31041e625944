"""`ranklab tour`: what the course feels like, in a terminal and in less than a minute.

labs/tour.ipynb shows the same at more length; the builder puts `add_up` and `train` into its cells.
"""

import os

import torch
import torch.distributed as dist

from ranklab.data import batch_at, python_text
from ranklab.data_parallel import average_gradients
from ranklab.engine import HangError, device, launch
from ranklab.hybrid import parse_layout
from ranklab.models.gpt import GPT, GPTConfig
from ranklab.projects.command import Command, refusals, say
from ranklab.projects.hybrid.compare import compare

LAYOUTS = ("4x1x1", "1x4x1", "1x1x4", "2x2x2")  # besides one process: the tour's five
STEPS = 5
FORGETFUL = 2
PATIENCE = 3  # seconds until the hang is reported


def add_up():
    """Add up the ranks' numbers; return the sum."""
    number = torch.tensor(dist.get_rank(), device=device())
    dist.all_reduce(number)  # in place: every rank now holds the sum
    print(f"process {os.getpid()} brings {dist.get_rank()}; the sum is {number.item()}")
    return number.item()


def train(tokens, steps, forgetful=None):
    """Train a small GPT with data parallelism; return the losses of this rank's rows.

    forgetful  the rank that never averages its gradients; None: all ranks average
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # equal weights on all ranks
    model = GPT(GPTConfig()).to(device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        batch = batch_at(tokens, step, batch=16, n_ctx=64)
        inputs, targets = (rows[rank::ranks].to(device()) for rows in batch)  # (B/R, T)
        loss = model(inputs, targets)
        loss.backward()
        if rank != forgetful:
            average_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def loss_table(alone, together):
    """Return the loss of each step on one rank and on several as text.

    alone, together  what `train` returned on each rank
    """
    lines = [f"step    1 rank{len(together):4} ranks"]
    for step, (one, several) in enumerate(zip(mean_losses(alone), mean_losses(together)), 1):
        lines.append(f"{step:4}{one:10.4f}{several:10.4f}")
    return "\n".join(lines)


def mean_losses(losses):
    """Average the ranks' losses, step by step."""
    return [sum(step) / len(step) for step in zip(*losses)]


def layout_table(rows):
    """Format the rows of `compare` as text: ranks, loss, bytes held and sent.

    rows  of projects.hybrid.compare.compare
    """
    lines = [f"{'dp x tp x pp':14}{'loss':>8}{'a rank holds':>16}{'and sends in a step':>23}"]
    for row in rows:
        held, sent = sum(row["held"].values()), sum(row["sent"].values())
        lines.append(f"{row['name']:14}{row['loss']:8.4f}{held / 1e3:13,.0f} KB"
                     f"{sent / 1e3:20,.0f} KB")
    return "\n".join(lines)


def hang(tokens):
    """Return the report of a training run in which one rank forgets to average."""
    try:
        launch(train, tokens, STEPS, FORGETFUL, ranks=4, timeout=PATIENCE)
    except HangError as report:
        return str(report)
    raise RuntimeError(f"rank {FORGETFUL} never averages, yet all ranks finished")


@refusals("ranklab tour")
def main(arguments):
    """Print the tour: four ranks, one loss, a named hang, five layouts."""
    Command("ranklab tour", __doc__.partition("\n")[0]).parse_args(arguments)
    say("Four processes add up their numbers: look at the sum, the same on every rank.")
    launch(add_up, ranks=4)
    say("\nA small GPT, trained on one rank and on four: look at the losses, equal step by step.")
    tokens = python_text().train
    say(loss_table(*(launch(train, tokens, STEPS, ranks=ranks) for ranks in (1, 4))))
    say(f"\nRank {FORGETFUL} leaves out one line: look at who waits, and who does not.")
    say(hang(tokens))
    say("\nOne model in five layouts: look at the bytes, which differ, and at the one loss.")
    say(layout_table(compare([*map(parse_layout, LAYOUTS)], progress=False)))
    say("dp ranks share the batch, tp ranks each matrix, pp ranks the layers.",
        "\nNext: `make lab`, then open tour.ipynb and 00_ranks.ipynb.")
