"""The gradient of a whole batch in little memory: everything in small pieces, one at a time."""

import torch

from ranklab.basics.targets import IGNORE


def frugal_gradients(model, inputs, targets):
    """Add the gradient of the mean loss to .grad, as model(inputs, targets).backward() does.

    The mean is over all targets that are not IGNORE.
    model: a GPT without dropout; its head may be tied to its embedding. Frozen weights get no
        gradient. The model is left as it was.
    Returns: the mean loss, detached.
    Memory: the peak is at most twice this bound: what one row keeps for backward if each block
        keeps only its input, plus what a single block keeps. The peak counts all tensors except
        parameters, gradients and buffers.
    Cost: at most 1.5 times the FLOPs of the plain step.
    Lab: 01
    """
    count, mean = (targets != IGNORE).sum(), 0.0
    for x, y in zip(inputs.split(1), targets.split(1)):  # one row at a time
        with torch.no_grad():
            hidden = [model.token(x)]  # the input of each block, then what the last one returns
            for block in model.blocks.values():
                hidden.append(block(hidden[-1]))
        pieces = []  # of the gradient of the row's hidden states
        for h, t in zip(hidden.pop().split(16, dim=1), y.split(16, dim=1)):  # logits of 16 tokens
            h = h.detach().requires_grad_()
            loss = model.loss(model.head, model.norm(h), t, "sum") / count
            loss.backward()
            mean = mean + loss.detach()
            pieces.append(h.grad)
        gradient = torch.cat(pieces, dim=1)
        for block in reversed(model.blocks.values()):
            h = hidden.pop().requires_grad_()
            block(h).backward(gradient)  # runs the block again: its activations live here only
            gradient = h.grad
        if model.token.weight.requires_grad:  # no name: it would live through the next row
            model.token(x).backward(gradient)
    return mean
