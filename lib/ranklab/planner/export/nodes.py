"""How many processes torchrun starts on each node: as many on each, and as many as GPUs in all."""


def nodes_of(plan, most):
    """Return (nodes, processes on each) of a plan on nodes of at most `most` GPUs.

    Raises ValueError if only one process would be left on each of several nodes.
    """
    each = next(n for n in range(min(most, plan.gpus), 0, -1) if plan.gpus % n == 0)
    if each == 1 < min(most, plan.gpus):
        raise ValueError(f"{plan.gpus} GPUs can't be divided evenly over nodes of {most}: only one "
                         "would be used on each node")
    return plan.gpus // each, each


def nodes_differ(plan, most):
    """Return sentences on the nodes that are not whole; none if torchrun uses whole nodes."""
    nodes, each = nodes_of(plan, most)
    crossing = ", so that some tensor ranks are on two nodes" if each % plan.tp else ""
    return [f"The prediction is for whole nodes of {most} GPUs. Here {each} are used on each of "
            f"{nodes}{crossing}."] * (nodes > 1 and each < most)
