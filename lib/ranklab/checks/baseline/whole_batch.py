"""Against one backward of the whole batch: what two checks of lab 01 share."""

import torch

from ranklab.basics.targets import IGNORE
from ranklab.checks.beside import expect
from ranklab.checks.trial import explain, is_near


def gradients(model):
    return {name: None if p.grad is None else p.grad.clone()
            for name, p in model.named_parameters()}


def batch(config, rows, tokens, ignored=()):
    """(inputs, targets); row i has ignored[i] targets that are IGNORE."""
    generator = torch.Generator().manual_seed(rows + tokens)
    inputs, targets = torch.randint(config.vocab_size, (2, rows, tokens), generator=generator)
    for row, count in enumerate(ignored):
        targets[row, :count] = IGNORE
    return inputs, targets


def compare_step(case, step, make_model, inputs, targets, slips, hint):
    """step(model, inputs, targets), twice, did what one backward does, and changed nothing else.

    slips  gradient, targets that count -> {what a mistake gets: (tensor, hint)}
    hint   the gradient that was found -> the hint for all else
    """
    model, oracle, x, y = make_model(), make_model(), inputs.clone(), targets.clone()
    right, weights = oracle(inputs, targets), [p.detach().clone() for p in model.parameters()]
    right.backward()
    loss = step(model, x, y)
    once = gradients(model)
    for name, grad in gradients(oracle).items():
        if grad is None:
            expect(once[name] is None, f"{case}: {name} is frozen, and yet it has a gradient",
                   "A frozen parameter gets no gradient.")
        else:
            explain(f"{case}: the gradient of {name}", once[name], grad,
                    slips(grad, int((targets != IGNORE).sum())), hint(once[name]))
    expect(loss is not None, f"{case}: it returned None", "Return the mean loss of the batch.")
    expect(not getattr(loss, "requires_grad", False), f"{case}: the loss it returned holds its "
           "graph", "Add up loss.detach(), or the graph of every piece stays in memory.")
    explain(f"{case}: the loss that it returned", float(loss), right.item(), through=torch.float32,
            hint="Return the mean over all targets that count, in the whole batch.")
    expect(torch.equal(x, inputs) and torch.equal(y, targets), "inputs or targets have changed",
           "Split them; do not write into them.")
    step(model, x, y)
    expect(all(grad is None or is_near(grad, 2 * once[name])
               for name, grad in gradients(model).items()),
           f"{case}: a second call did not add the same gradient again", "Leave .grad as you find "
           "it: setting it to zero is the caller's business. And leave the model as it was: put "
           "back what you replaced in it.")
    expect(all(map(torch.equal, model.parameters(), weights)), "the weights have changed",
           "Only .grad may change; the step comes later.")
