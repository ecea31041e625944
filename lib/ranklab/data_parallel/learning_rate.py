"""A larger batch has a less noisy gradient, which allows a larger step."""


def scale_learning_rate(lr, batch, base_batch, step=None, warmup=0, rule="linear"):
    """Scale the learning rate `lr`, which is right for `base_batch`, to `batch`.

    With step (from 0) and warmup: linear from lr at step 0 to the scaled rate at step `warmup`.
    rule: "linear" (k times the batch, k times lr: for SGD) or "sqrt" (for Adam).
    Raises: ValueError for any other rule, and for a batch, base_batch or warmup that is too small.
    Paper: Goyal et al. 2017, Accurate, Large Minibatch SGD, sections 2.1 and 2.2
    Lab: 03
    """
    if batch < 1 or base_batch < 1 or warmup < 0:
        raise ValueError(f"batch={batch} and base_batch={base_batch} must be at least 1, and "
                         f"warmup={warmup} at least 0")
    powers = {"linear": 1, "sqrt": 0.5}
    if rule not in powers:
        raise ValueError(f"rule={rule!r} must be one of {', '.join(powers)}")
    scaled = lr * (batch / base_batch) ** powers[rule]
    if step is None or step >= warmup:
        return scaled
    return lr + (scaled - lr) * step / warmup
