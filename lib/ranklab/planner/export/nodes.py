"""How many processes torchrun starts on each node: the same number on each, one for each GPU."""

HOST_GPUS = {"GB200": 4, "GB300": 4}  # of a compute tray, which has an operating system of its own
# (docs.nvidia.com/enterprise-reference-architectures/nvl72-ai-factory, components)


def host_gpus(machine):
    """Return the GPUs of one operating system, where torchrun is called once: of an NVL72's tray,
    and otherwise of a node.
    """
    return min(machine.node, HOST_GPUS.get(machine.family, machine.node))


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
    crossing = " and puts tensor ranks on two nodes" if each % plan.tp else ""
    return [f"{plan.gpus} GPUs do not fill nodes of {most}: torchrun starts {each} on each of "
            f"{nodes}{crossing}, which the prediction does not count in."] * (
                nodes > 1 and each < most)
