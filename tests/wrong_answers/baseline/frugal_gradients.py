"""Lab 01: the gradient in little memory, with one part left whole, or another gradient."""

from functools import partial

from mutants import mutant
from torch.utils.checkpoint import checkpoint

from ranklab.baseline import accumulate_gradients, checkpoint_blocks, frugal_gradients
from ranklab.models.gpt import cross_entropy

ROWS = "zip(inputs.split(1), targets.split(1))"
GOES_ON = "block(h).backward(gradient)"

WRONG = [mutant(frugal_gradients, *edits, says=says) for *edits, says in (
    (ROWS, ROWS.replace("1", "2"), "one row at a time"),
    ("hidden.pop().split(16, dim=1), y.split(16, dim=1)", "hidden[-1:], [y]",
     "pieces.append(h.grad)",
     "pieces.append(h.grad)\n        hidden.pop()", "logits of a whole row"),
    ("(targets != IGNORE).sum()", "targets.numel()", "Divide every piece's sum"),
    ("model.token(x).backward(gradient)", "pass", "The embedding has two jobs"),
    (GOES_ON, f"block(h).backward(gradient, retain_graph=True)\n            kept_on = block(h)\n"
     "            block(kept_on)", "not three times"),
    ("mean = mean + loss.detach()", "mean = mean + loss", "Add up loss.detach"),
    ("return mean", "return mean / len(inputs)", "the loss that it returned is"),
    ('t, "sum") / count', 't) / len(inputs)', "Divide"),
    ("count, mean = ", "model.zero_grad()\n    count, mean = ", "caller's business"),
)]  # fmt: skip


def frugal_gradients__logits_whole(model, inputs, targets):
    """logits of a whole row"""
    checkpoint_blocks(model, partial(checkpoint, use_reentrant=False))
    mean = accumulate_gradients(lambda x, y: model(x, y, "sum"), inputs, targets, 1)
    for block in model.blocks.values():
        del block.forward
    return mean


def frugal_gradients__blocks_behind_a_frozen_embedding(model, inputs, targets):
    """where no input needs a gradient"""
    before, model.loss = model.loss, partial(cross_entropy, chunks=4)
    checkpoint_blocks(model)
    mean = accumulate_gradients(lambda x, y: model(x, y, "sum"), inputs, targets, 1)
    model.loss = before
    for block in model.blocks.values():
        del block.forward
    return mean


def frugal_gradients__never_put_back(model, inputs, targets):
    """not as it was"""
    model.loss = partial(cross_entropy, chunks=4)
    for block in model.blocks.values():
        if "forward" not in vars(block):
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return accumulate_gradients(lambda x, y: model(x, y, "sum"), inputs, targets, 1)


def frugal_gradients__no_recomputing(model, inputs, targets):
    """Keep the inputs of the blocks"""
    before = model.loss
    model.loss = partial(cross_entropy, chunks=8)
    mean = accumulate_gradients(lambda x, y: model(x, y, "sum"), inputs, targets, 1)
    model.loss = before
    return mean


def frugal_gradients__the_whole_batch(model, inputs, targets):
    """blocks of many rows"""
    before, model.loss = model.loss, partial(cross_entropy, chunks=16)
    for block in model.blocks.values():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    loss = model(inputs, targets)
    loss.backward()
    model.loss = before
    for block in model.blocks.values():
        del block.forward
    return loss.detach()


def frugal_gradients__the_mean_of_rows(model, inputs, targets):
    """count of the whole batch"""
    means = []
    for x, y in zip(inputs.split(1), targets.split(1)):
        loss = model(x, y)
        loss.backward()
        means.append(loss.detach() / len(inputs))
    return sum(means)


def frugal_gradients__a_step_of_its_own(model, inputs, targets):
    """second call did not add"""
    for parameter in model.parameters():
        parameter.grad = None
    loss = model(inputs, targets)
    loss.backward()
    return loss.detach()
