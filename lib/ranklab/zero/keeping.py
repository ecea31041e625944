"""Which units to keep unsharded in a step of stage 3; a model of such a step, without processes."""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate, combinations


@dataclass(frozen=True)
class Step:
    """One micro-batch of stage 3: the size and compute time of each unit, one link, and the memory.

    nbytes: bytes of each unit's parameters; its gradients have the same number of bytes.
    compute: seconds of each unit's forward; its backward takes twice as long.
    limit: bytes of parameters that may be gathered or on their way at a time.
    alpha, beta: a message of n bytes takes alpha + beta n seconds; messages go one at a time.

    Units are gathered in the order of their use, each as early as there is room for it. A unit's
    gradients are reduced after its backward. The model leaves out activations, whole gradients,
    parameters that belong to no unit, and the slowdown of computation by messages.
    """

    nbytes: tuple
    compute: tuple
    limit: float
    alpha: float
    beta: float

    def send(self, unit):
        """Return the seconds of one message with the parameters or gradients of `unit`."""
        return self.alpha + self.beta * self.nbytes[unit]

    def seconds(self, resident=()):
        """Return the seconds of a step; infinite if the resident units do not fit into the limit.

        resident: units that stay whole from forward to backward.
        """
        n, resident = len(self.nbytes), frozenset(resident)
        horizon = self.horizon(resident)
        device = link = 0.0  # the times at which device and link are free again
        begun, arrived = 0, [0.0] * (2 * n)
        for position in range(2 * n):  # n forwards, n backwards
            if horizon[position] < position:
                return float("inf")
            while begun <= horizon[position]:
                unit = begun if begun < n else 2 * n - 1 - begun
                if begun < n or unit not in resident:
                    link = arrived[begun] = (link if link > device else device) + self.send(unit)
                begun += 1
            device = arrived[position] if arrived[position] > device else device
            if position < n:
                device += self.compute[position]
            else:
                device += 2 * self.compute[2 * n - 1 - position]
                link = (link if link > device else device) + self.send(2 * n - 1 - position)
        return max(device, link)

    def horizon(self, resident):
        """Return, for each position in the order of use, the last one that may be gathered then."""
        forward = self.nbytes
        backward = [0 if unit in resident else n for unit, n in enumerate(forward)][::-1]
        bytes_to = [0, *accumulate(forward)]  # gathered for the places before this one
        bytes_to += [bytes_to[-1] + n for n in accumulate(backward)]
        sizes = [n if unit in resident else 0 for unit, n in enumerate(forward)]
        others = [0, *accumulate(sizes)]
        others = others[:-1] + others[:0:-1]  # bytes of other resident units, at each position
        last = [bisect_right(bytes_to, self.limit - other + bytes_to[position]) - 2
                for position, other in enumerate(others)]
        return [*accumulate(last[::-1], min)][::-1]  # a gathered unit stays until it is used

    def bound(self):
        """Return a lower bound on the seconds for any choice of units: of link or device alone.

        All resident units must fit into the limit at the end of forward. So the largest saving of
        messages comes from the smallest units that fill the limit, the last one counted in part.
        """
        n = len(self.nbytes)
        order = [*range(n), *reversed(range(n))]
        compute = [self.compute[u] * (1 if i < n else 2) for i, u in enumerate(order)]
        sends = [self.send(unit) for unit in order]
        bounds = [sum(sends) + sum(sends[n:]) - self.max_saving(range(n))]
        for position in range(2 * n):
            gathers = sum(sends[: position + 1]) - self.max_saving(order[n : position + 1])
            bounds.append(gathers + sum(compute[position:]) + sends[-1])
        return max(bounds)

    def max_saving(self, units):
        budget, saved = self.limit, 0.0
        for unit in sorted(units, key=lambda unit: self.nbytes[unit]):
            part = min(1, budget / self.nbytes[unit])
            budget -= part * self.nbytes[unit]
            saved += part * self.send(unit)
        return saved


def keep_in_order(step, order, stops=False):
    """List the units that fit, tried in this order; with `stops`, end at the first misfit."""
    resident = []
    for unit in order:
        if step.seconds([*resident, unit]) < float("inf"):
            resident.append(unit)
        elif stops:
            break
    return resident


def last_that_fit(step):
    """Keep the units that are used again soonest, as DeepSpeed's stage3_max_reuse_distance does."""
    return keep_in_order(step, reversed(range(len(step.nbytes))), stops=True)


def transformer_step(blocks, attention, mlp, tokens, limit, alpha, beta, active=None, flops=400e12):
    """Make the Step of a transformer in bf16: each block has two units, its attention and its MLP.

    attention, mlp: the number of parameters of one such unit.
    active: the MLP's parameters used for a token, if it has experts.
    """
    forward = [2 * n * tokens / flops for n in (attention, active or mlp)]
    return Step((2 * attention, 2 * mlp) * blocks, (*forward,) * blocks, limit, alpha, beta)


def published_steps():
    """Make {name: Step} of 20 units: the shapes are published, the times computed, not measured.

    alpha is 1 ms. A node receives 87 GB/s over eight cards of 100 Gbit/s, a quarter of the
    bandwidth measured over eight cards of 400 (nccl-tests issue 283), and 12.5 GB/s over one card.
    """
    cards, one = (1e-3, 1 / 87e9), (1e-3, 1 / 12.5e9)
    return {
        "Mixtral 8x7B, 12 GB": transformer_step(10, 42e6, 1.409e9, 8192, 12e9, *cards, 352e6),
        "Llama-2-70B, 6 GB": transformer_step(10, 151e6, 705e6, 4096, 6e9, *cards),
        "Llama-2-7B, one card, 3 GB": transformer_step(10, 67e6, 135e6, 8192, 3e9, *one),
    }


def units_to_keep(step):
    """List the units to keep whole from forward to backward, so that step.seconds(units) is small.

    Two uses compete for memory. A unit that is kept needs no second gather; and a unit that is
    gathered early hides behind the computation of the units before it.
    Cost: n^2 / 2 calls of step.seconds() for each change, not 2^n; so not always the best set.
    Raises: ValueError if the largest unit is above the limit.
    Lab: 06
    """
    if step.seconds() == float("inf"):
        raise ValueError(f"limit={step.limit:g} is less than the largest unit, "
                         f"{max(step.nbytes):g} bytes")
    units, best = range(len(step.nbytes)), frozenset()
    one = [{unit} for unit in units]
    for changes in one, one + [{*two} for two in combinations(units, 2)]:
        while True:  # adds, drops, and of two at a time one out and another in
            better = min((best ^ change for change in changes), key=step.seconds)
            if step.seconds(better) >= step.seconds(best):
                break
            best = better
    return sorted(best)


def scores(step):
    """Return {choice: seconds of the step}: for the library's choice, others, and the bound."""
    return {"library": step.seconds(units_to_keep(step)), "none": step.seconds(),
            "the last that fit": step.seconds(last_that_fit(step)), "bound": step.bound()}
