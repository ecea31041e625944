"""A large batch in small pieces: the same gradient with the memory of one piece."""

from ranklab.basics.targets import IGNORE


def accumulate_gradients(loss_sum, inputs, targets, micro_batch):
    """Add the gradient of the mean loss over all targets to .grad, one micro-batch at a time.

    The gradient is the same as for the whole batch at once.
    loss_sum: (inputs, targets) -> the sum of the losses of the targets that count.
    Returns: the mean loss, detached.
    Memory: the activations of `micro_batch` rows at a time.
    Lab: 01
    """
    count = (targets != IGNORE).sum()  # over the whole batch: pieces may hold unequal numbers
    mean = 0.0
    for x, y in zip(inputs.split(micro_batch), targets.split(micro_batch)):
        loss = loss_sum(x, y) / count
        loss.backward()  # adds to .grad, and frees the activations of this piece
        mean = mean + loss.detach()
    return mean
