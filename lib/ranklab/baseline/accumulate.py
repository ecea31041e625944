"""A big batch in small pieces: the same gradient, the memory of one piece."""

from ranklab.basics.targets import IGNORE


def accumulate_gradients(loss_sum, inputs, targets, micro_batch):
    """Each parameter's .grad has grown by the gradient of the mean loss over all targets, as if
    the batch had been one piece; returns that mean, detached.
    loss_sum  (inputs, targets) -> the sum of the losses of the targets that count
    memory    the activations of `micro_batch` rows at a time
    lab       01
    """
    count = (targets != IGNORE).sum()  # over the whole batch: pieces may hold unequal numbers
    mean = 0.0
    for x, y in zip(inputs.split(micro_batch), targets.split(micro_batch)):
        loss = loss_sum(x, y) / count
        loss.backward()  # adds to .grad, and frees the activations of this piece
        mean = mean + loss.detach()
    return mean
