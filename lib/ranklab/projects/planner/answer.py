"""The answer of `ranklab plan`, as a dict that --json prints and table.py formats as text."""

import dataclasses

from ranklab.planner.cost import DAY, price_of
from ranklab.planner.failures import (
    OFTEN, RESTART, checkpoint_seconds, good_share_of, hours_between_failures,
)
from ranklab.planner.offers import ranked
from ranklab.planner.request import Request
from ranklab.planner.score import LEFT_OUT, likely_range, median_errors
from ranklab.planner.search import room
from ranklab.planner.why import assumptions, shares, why


def answer(name, wish, source, layouts, searched, offers, limits, changes):
    """Return the answer as a dict: numbers in SI units, from the library's own functions.

    layouts: [Found], the best first; searched: how many fit
    offers: [Offer] for a budget or deadline (limits); None if neither is given
    changes: [Change]; empty if none were asked for
    """
    best = layouts[0]
    low, high, basis = likely_range(wish.model, best.plan, wish.machine)
    return {
        **head(name, wish.model, wish.sequence, wish.batch), "gpus": wish.gpus,
        "machine": {**dataclasses.asdict(wish.machine),
                    "memory_used": room(wish.machine, wish.reserve)},
        "reserve": wish.reserve, "layouts_that_fit": searched,
        "layouts": [layout(wish, candidate) for candidate in layouts],
        "errors": {**dict(zip(("time", "memory"), median_errors())), "left_out": LEFT_OUT},
        "assumptions": [{"what": text, "seconds_without": seconds} for text, seconds
                        in assumptions(wish.model, best.plan, wish.machine)],
        "range": {"low": low * best.step.total, "high": high * best.step.total, "of": basis},
        "bill": {**dataclasses.asdict(wish.bill(best)), "price": wish.price, "source": source,
                 "good_share": good_share_of(wish.model, wish.machine, wish.gpus),
                 "good_share_often": good_share_of(wish.model, wish.machine, wish.gpus, OFTEN),
                 "often": OFTEN, "hours_between_failures": hours_between_failures(wish.gpus),
                 "restart_seconds": RESTART, "checkpoint_seconds": checkpoint_seconds(
                     wish.model, max(1, wish.gpus / wish.machine.node))},
        "budget": limits[0], "deadline": limits[1],
        "offers": [{"gpus": each.layout.plan.gpus, "layout": each.layout.plan.words(),
                    "tool": each.layout.plan.tool, "meets": not each.miss(*limits),
                    **dataclasses.asdict(each.bill)} for each in ranked(offers or (), *limits)],
        "sensitivity": [{"what": each.quantity, "factor": each.factor, "same": each.same,
                         **(layout(each.request, each.best) if each.best else {"layout": None})}
                        for each in changes]}


def head(name, model, sequence, batch):
    """Return the model and the batch, as a part of the answer."""
    return {"model": {"name": name, "parameters": model.parameters, "active": model.active,
                      **dataclasses.asdict(model)}, "sequence": sequence, "batch": batch}


def layout(wish, candidate):
    """Return one layout, as a part of the answer."""
    plan, memory, step = candidate
    mfu = {name: kind(wish.model, plan, wish.machine, causal=causal)
           for name, kind, causal in (("mfu", step.mfu, False), ("mfu_causal", step.mfu, True),
                                      ("hfu", step.hfu, False))}
    return {"layout": plan.words(), "tool": plan.tool, "bytes": memory.total,
            "seconds": step.total, **mfu, "tokens_per_second": step.tokens_per_second(plan),
            "dollars_per_token": wish.dollars(candidate), "why": why(plan, step, wish.machine),
            "shares": shares(plan, step, wish.machine), "plan": dataclasses.asdict(plan),
            "memory": dataclasses.asdict(memory), "step": dataclasses.asdict(step)}


def mixed_answer(name, model, parts, mixes, options):
    """Return the answer for several kinds of GPUs: each kind's part in the fastest layout."""
    best, total, tokens = mixes[0], sum(gpus for _, gpus in parts), options.batch * options.seq
    peak = sum(gpus * machine.peak() for machine, gpus in parts)
    singles = [Request(model, machine, gpus, options.seq, options.batch, tuple(options.tool),
                  reserve=options.reserve).best()
               for machine, gpus in parts]
    good = min(good_share_of(model, machine, total) for machine, _ in parts)
    seconds = options.tokens / tokens * best.seconds / good
    prices = [options.price or price_of(machine.accelerator)[0] for machine, _ in parts]
    dollars = None if None in prices else sum(
        gpus * seconds / 3600 * price for (_, gpus), price in zip(parts, prices))
    return {
        **head(name, model, options.seq, options.batch), "gpus": total, "layout": {
            **dataclasses.asdict(best.plans[0]), "words": best.plans[0].words().partition(", ")[2]},
        "bytes": best.memory.total, "seconds": best.seconds, "reserve": options.reserve,
        "mfu": model.flops_per_token(options.seq) * tokens / best.seconds / peak,
        "kinds": [{"machine": dataclasses.asdict(machine), "gpus": gpus, "data_ranks": plan.dp,
                   "micro_batches": plan.micro_batches, "price": price,
                   "share": plan.batch / options.batch, "alone": fit and fit.step.total}
                  for (machine, gpus), plan, price, fit in zip(parts, best.plans, prices, singles)],
        "bill": {"tokens": options.tokens, "days": seconds / DAY, "dollars": dollars,
                 "good_share": good, "gpu_hours": total * seconds / 3600}}
