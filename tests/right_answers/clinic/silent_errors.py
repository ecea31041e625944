"""Lab 16: mends that differ from the library's. Each must pass."""

from ranklab.checks.prover.slips import edited
from ranklab.clinic.trainings import (
    long_steps, moving_curve, no_faster, saved_model, worse_together,
)

NORM = """\
        part.grad /= R
        norm = part.grad.square().sum()
        dist.all_reduce(norm, group=group)
        norm = norm.sqrt()
"""
START = """\
    for p in model.parameters():
        dist.broadcast(p.detach(), group=group, group_src=0)
    mean = copy.deepcopy(model)
"""
EXAMPLES = "    examples = y[torch.randperm(len(y))[:8]].tolist() if rank == 0 else []\n"
SAMPLER = """\
    sampler = DistributedSampler(data, R, rank, seed=seed)
    loader = DataLoader(data, batch // R, sampler=sampler)
"""
LOOP = """\
        sampler.set_epoch(epoch)
        seen.append([])
        for images, labels, at in loader:
"""

RIGHT = {kind: edited(answer, edits) for answer, *edits, kind in (
    (long_steps, NORM, "        dist.all_reduce(w.grad, group=group)\n        part.grad = w.grad["
     "rank * size:][:size] / R\n        norm = (w.grad / R).norm()\n", "the_whole_gradient"),
    (saved_model, START, "    dist.broadcast(flat := pack(model.parameters()).detach(), "
     "group=group, group_src=0)\n    nn.utils.vector_to_parameters(flat, model.parameters())\n"
     "    mean = copy.deepcopy(model)\n", "one_message"),
    (saved_model, START.splitlines()[1], START.splitlines()[1].replace("src=0", "src=R - 1"),
     "of_the_last_rank"),
    (saved_model, EXAMPLES, "", START, START + EXAMPLES, "examples_drawn_later"),
    (saved_model, "torch.randperm(len(y))", "torch.randperm(len(y), generator=torch.Generator())",
     "examples_by_a_generator"),
    (no_faster, SAMPLER, "", LOOP, "        order = torch.randperm(len(x), generator=torch."
     "Generator().manual_seed(100 * seed + epoch))\n        seen.append([])\n        for step in "
     "order.split(batch):\n            if len(step) < batch:\n                continue\n"
     "            at = step[rank::R]\n            images, labels = x[at], y[at]\n", "slices"),
    (worse_together, "LambdaLR(optimizer, lambda step: (1 + (times - 1) * min(1, step / each))\n"
     "                         * max(0, 1 - step / (epochs * each)))",
     "LambdaLR(optimizer, lambda step: (min(step, each) * times + each - min(step, each)) / each\n"
     "                         * (1 - step * R * batch / (1152 * epochs)))", "another_formula"),
    (moving_curve, '"sum") / count', '"sum") * R / count',
     "            dist.all_reduce(tensor, group=group)\n", "            dist.all_reduce(tensor, "
     "group=group)\n            tensor /= R\n", "averages_of_R_times"),
)}
