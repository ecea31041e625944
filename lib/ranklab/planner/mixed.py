"""mixed_step: the step of a cluster of unlike GPUs, each kind with data ranks of its own."""

from dataclasses import replace

from ranklab.planner.step import step_time


def mixed_plans(model, plan, parts, batch):
    """[Plan]: for each (machine, GPUs) of `parts` its data ranks, with micro-batches so that all
    end at about the same time, and the batch is whole.

    plan   what all have alike: tp, pp, cp, micro-batch
    error  ValueError where tp x pp x cp does not divide the GPUs of a part
    """
    whole = plan.tp * plan.pp * plan.cp
    if wrong := [gpus for _, gpus in parts if gpus % whole]:
        raise ValueError(f"tp x pp x cp = {whole} must divide the {wrong[0]} GPUs of a kind")
    ranks = [gpus // whole for _, gpus in parts]
    plans = [replace(plan, dp=dp, micro_batches=1) for dp in ranks]
    pieces, left = [1] * len(parts), batch // plan.micro_batch - sum(ranks)
    if batch % plan.micro_batch or left < 0:
        raise ValueError(f"a batch of {batch} has not a micro-batch of {plan.micro_batch} for each "
                         f"of {sum(ranks)} data ranks")

    def ends(place):  # seconds of this part with one micro-batch more
        more = replace(plans[place], micro_batches=pieces[place] + 1)
        return step_time(model, more, parts[place][0]).total

    while left:  # the next micro-batch goes where it will be done first
        room = [place for place in range(len(parts)) if ranks[place] <= left]
        if not room:
            raise ValueError(f"micro-batches of {plan.micro_batch} can't fill a batch of {batch} "
                             f"over {', '.join(map(str, ranks))} data ranks")
        place = min(room, key=ends)
        pieces[place] += 1
        left -= ranks[place]
    return [replace(each, micro_batches=M) for each, M in zip(plans, pieces)]


def mixed_step(model, plans, machines):
    """Seconds of a step: of the slowest kind, whose gradients then go over the slowest network."""
    slowest = min(each.network for each in machines)
    everyone = sum(plan.dp for plan in plans)
    longest = 0.0
    for plan, machine in zip(plans, machines):
        step = step_time(model, plan, machine)
        together = replace(plan, dp=everyone)
        data = step_time(model, together, replace(machine, network=slowest)).data
        longest = max(longest, step.total - step.data + data)
    return longest
