"""A model of one step of stage 3, without processes, and a choice of the units to keep whole in
it."""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate, combinations


@dataclass(frozen=True)
class Step:
    """One micro-batch of stage 3: the size and compute time of each unit, one link, and the memory.

    nbytes       of each unit's parameters, and as many of its gradients
    compute      seconds of each unit's forward; its backward takes twice as long
    limit        bytes of parameters that may be whole or on their way at a time
    alpha, beta  a message of n bytes takes alpha + beta n seconds; one travels at a time

    Units are gathered in the order of their use, each one as early as there is room for it. A
    unit's gradients are reduced after its backward. The model leaves out activations, whole
    gradients, parameters that belong to no unit, and that messages slow the computing down.
    """

    nbytes: tuple
    compute: tuple
    limit: float
    alpha: float
    beta: float

    def send(self, unit):
        """The seconds of one message of that unit."""
        return self.alpha + self.beta * self.nbytes[unit]

    def seconds(self, kept=()):
        """The seconds of a step in which the units in `kept` stay whole from forward to backward;
        infinite if they do not fit into the limit.
        """
        n, kept = len(self.nbytes), frozenset(kept)
        ahead = self.gathered_ahead(kept)
        now = link = 0.0  # the times at which device and link are free again
        begun, arrived = 0, [0.0] * (2 * n)
        for place in range(2 * n):  # n forwards, n backwards
            if ahead[place] < place:
                return float("inf")
            while begun <= ahead[place]:
                unit = begun if begun < n else 2 * n - 1 - begun
                if begun < n or unit not in kept:
                    link = arrived[begun] = (link if link > now else now) + self.send(unit)
                begun += 1
            now = arrived[place] if arrived[place] > now else now
            if place < n:
                now += self.compute[place]
            else:
                now += 2 * self.compute[2 * n - 1 - place]
                link = (link if link > now else now) + self.send(2 * n - 1 - place)
        return max(now, link)

    def gathered_ahead(self, kept):
        """For each place in the order of use: the last place whose unit may be in memory by
        then."""
        forward = self.nbytes
        backward = [0 if unit in kept else n for unit, n in enumerate(forward)][::-1]
        bytes_to = [0, *accumulate(forward)]  # gathered for the places before this one
        bytes_to += [bytes_to[-1] + more for more in accumulate(backward)]
        before = [0, *accumulate(n if unit in kept else 0 for unit, n in enumerate(forward))]
        held = before[:-1] + before[:0:-1]  # bytes of other kept units, at each place
        ahead = [bisect_right(bytes_to, self.limit - there + bytes_to[place]) - 2
                 for place, there in enumerate(held)]
        return [*accumulate(ahead[::-1], min)][::-1]  # what is gathered stays until used

    def bound(self):
        """No choice of units is faster than this: the device or the link alone would take as long.

        All units that are kept must fit into the limit at the turn from forward to backward. So the
        most messages are saved by the smallest units that fill it, the last one counted in part.
        """
        n = len(self.nbytes)
        order = [*range(n), *reversed(range(n))]
        computing = [self.compute[u] * (1 if place < n else 2) for place, u in enumerate(order)]
        sends = [self.send(unit) for unit in order]
        least = [sum(sends) + sum(sends[n:]) - self.most_saved(range(n))]
        for place in range(2 * n):
            gathers = sum(sends[: place + 1]) - self.most_saved(order[n : place + 1])
            least.append(gathers + sum(computing[place:]) + sends[-1])
        return max(least)

    def most_saved(self, units):
        budget, saved = self.limit, 0.0
        for unit in sorted(units, key=lambda unit: self.nbytes[unit]):
            part = min(1, budget / self.nbytes[unit])
            budget -= part * self.nbytes[unit]
            saved += part * self.send(unit)
        return saved


def keep_in_order(step, order, stops=False):
    """All units that fit, tried in this order; with `stops`, only those before the first misfit."""
    kept = []
    for unit in order:
        if step.seconds([*kept, unit]) < float("inf"):
            kept.append(unit)
        elif stops:
            break
    return kept


def last_that_fit(step):
    """The units that are used again soonest, as DeepSpeed's stage3_max_reuse_distance chooses
    them."""
    return keep_in_order(step, reversed(range(len(step.nbytes))), stops=True)


def transformer_step(blocks, attention, mlp, tokens, limit, alpha, beta, active=None, flops=400e12):
    """The Step of a transformer in bf16: each block has two units, its attention and its MLP.

    attention, mlp  the number of parameters of one such unit
    active          the MLP's parameters that compute for a token, where experts are chosen
    """
    forward = [2 * n * tokens / flops for n in (attention, active or mlp)]
    return Step((2 * attention, 2 * mlp) * blocks, (*forward,) * blocks, limit, alpha, beta)


def published_steps():
    """{name: Step} of 20 units: the shapes are published, the times computed and not measured.

    alpha is 1 ms. A node receives 87 GB/s over eight cards of 100 Gbit/s, which is a quarter of
    what was measured over eight cards of 400 (nccl-tests issue 283), and 12.5 over one card.
    """
    cards, one = (1e-3, 1 / 87e9), (1e-3, 1 / 12.5e9)
    return {
        "Mixtral 8x7B, 12 GB": transformer_step(10, 42e6, 1.409e9, 8192, 12e9, *cards, 352e6),
        "Llama-2-70B, 6 GB": transformer_step(10, 151e6, 705e6, 4096, 6e9, *cards),
        "Llama-2-7B, one card, 3 GB": transformer_step(10, 67e6, 135e6, 8192, 3e9, *one),
    }


def units_to_keep(step):
    """The units that stay whole from forward to backward, as a list: step.seconds(kept) is small.

    Memory is wanted twice. A unit that is kept needs no second gather; and a unit that is gathered
    early hides behind the computing of those before it.
    cost   n^2 / 2 calls of step.seconds() for each change, not 2^n; so not always the best set
    error  ValueError where the largest unit is above the limit
    lab    06
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
    """{choice of what stays whole: seconds of the step}: the library's, others, and the bound."""
    return {"library": step.seconds(units_to_keep(step)), "none": step.seconds(),
            "the last that fit": step.seconds(last_that_fit(step)), "bound": step.bound()}
