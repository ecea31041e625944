"""The trainings of clinic/sharded.py in one process: what their checks compare with.

Written without them: plain models, all rows, torch's own clipping. In float64, as the checks run.
"""

import contextlib
import os

import torch
import torch.nn.functional as F
from torch import nn

from ranklab.data import batch_at, held_out_batch, text_file
from ranklab.models.gpt import GPT, GPTConfig


@contextlib.contextmanager
def as_a_rank_of_the_check():
    """Inside, new tensors have 64 bits, and one thread computes: two that wait for each other on a
    busy machine take a hundred times as long.
    """
    before, threads = torch.get_default_dtype(), torch.get_num_threads()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
        torch.set_num_threads(threads)


def text():
    return text_file(os.__file__)


def small_model(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(256, 16), nn.Flatten(), nn.Linear(128, 64), nn.ReLU(),
                         nn.Linear(64, 256))


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


@as_a_rank_of_the_check()
def flat_alone(steps, lr, max_norm, seed, momentum=0.9):
    """What flat_model returns, and the "gradient" of the first step.

    With max_norm=inf and another momentum also gathered_model's losses; "stale": the loss of each
    step's rows with the weights before the step before; "held_out" and "held_out_stale": after
    each step, and before it; "before": all weights before the last step.
    """
    model = small_model(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=momentum)
    unseen, following = held_out_batch(text().held_out, 48, 8)
    seen = {name: [] for name in ("losses", "norms", "stale", "held_out", "held_out_stale")}
    before = model.state_dict()

    def loss_of(weights, inputs, targets):
        return F.cross_entropy(torch.func.functional_call(model, weights, inputs), targets[:, -1])

    for step in range(steps):
        rows = batch_at(text().train, step, 48, 8, seed)
        seen["stale"].append(loss_of(before, *rows).item())
        before = {name: weight.clone() for name, weight in model.state_dict().items()}
        optimizer.zero_grad()
        loss = loss_of({}, *rows)
        loss.backward()
        if not step:
            seen["gradient"] = flat(weight.grad for weight in model.parameters())
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        for name, weights in (("held_out", {}), ("held_out_stale", before)):
            seen[name].append(loss_of(weights, unseen, following).item())
        seen["losses"].append(loss.item())
        seen["norms"].append(norm.item())
    return seen | {"weights": flat(model.parameters()), "before": flat(before.values())}


@as_a_rank_of_the_check()
def gpt_alone(steps, lr, seed, batch, n_layer=2, tied=None):
    """(losses, {name: weight}) of a GPT.

    tied  (gradient of the embedding, gradient of the head) -> what both are trained by; None: as
          torch has it, where the two are one
    """
    torch.manual_seed(seed)
    model = GPT(GPTConfig(n_ctx=16, n_embd=32, n_layer=n_layer))
    if tied:
        model.head.weight = nn.Parameter(model.token.weight.detach().clone())
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr), []
    for step in range(steps):
        loss = model(*batch_at(text().train, step, batch, 16, seed))
        optimizer.zero_grad()
        loss.backward()
        if tied:
            both = model.token.weight.grad, model.head.weight.grad
            model.token.weight.grad, model.head.weight.grad = [tied(*both).clone() for _ in both]
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: weight.detach() for name, weight in model.state_dict().items()}


@as_a_rank_of_the_check()
def wide_alone(steps, lr, seed, masks):
    """(losses of each data rank, {name: weight}) of wide_layer's model that drops by `masks`.

    masks  [[(of the wide layer, of its output) for each data rank] for each step], in factors
    """
    torch.manual_seed(seed)
    embed, up = nn.Embedding(256, 16), nn.Linear(128, 96, bias=False)
    down, head = nn.Linear(96, 32, bias=False), nn.Linear(32, 256)
    model = nn.ModuleDict({"embed": embed, "up": up, "down": down, "head": head})
    optimizer, losses = torch.optim.SGD(model.parameters(), lr), []
    for step in range(steps):
        inputs, targets = batch_at(text().train, step, 24, 8, seed)
        wide, narrow = (torch.cat(each) for each in zip(*masks[step]))
        y = down(up(embed(inputs).flatten(1)).relu() * wide) * narrow
        each = F.cross_entropy(head(y), targets[:, -1], reduction="none")
        optimizer.zero_grad()
        each.mean().backward()
        optimizer.step()
        losses.append([rows.mean().item() for rows in each.chunk(len(masks[step]))])
    return list(zip(*losses)), {name: w.detach() for name, w in model.named_parameters()}
