"""The all-to-all of experts in an NVLink domain of 72 GPUs, or in nodes of 8 and the network."""

import re
from dataclasses import replace
from typing import NamedTuple

from ranklab.planner.constants import CONSTANTS
from ranklab.planner.jobs import with_jobs
from ranklab.planner.links import exchange_seconds
from ranklab.planner.published import all_runs
from ranklab.planner.step import step_time
from ranklab.planner.traffic import volumes


def crossing_share(ranks, domain):
    """Return the share of an all-to-all's rows that leave their NVLink domain.

    Loads are even, and `domain` of the group's `ranks` share a domain.
    """
    return 1 - min(domain, ranks) / ranks


class ExpertTraffic(NamedTuple):
    """The all-to-alls of a step, on a GPU of the average stage.

    domain: GPUs of an NVLink domain that the run uses.
    crossing: share of a plain all-to-all's rows that leave the domain.
    nbytes: sent over the network; a token goes only once to each domain with some of its experts.
    seconds: of all all-to-alls, before any is hidden.
    step: seconds of the whole step.
    """

    domain: int
    crossing: float
    nbytes: float
    seconds: float
    step: float


def expert_traffic(model, plan, machine, domain, constants=CONSTANTS):
    """Compute the ExpertTraffic of a plan if NVLink joined `domain` GPUs of this machine.

    Raises: ValueError if no experts travel, or if tensor ranks do not fit in a domain.
    """
    if plan.ep == 1:
        raise ValueError("no token travels to an expert: the layout has ep=1")
    if domain < 1 or domain % plan.tp:
        raise ValueError(f"tp={plan.tp} must divide a domain of {domain} GPUs")
    machine = replace(machine, node=domain)
    often = model.sparse_layers * plan.micro_batches / plan.pp
    exchanges = volumes(model, plan, machine).sparse_layer["expert"]
    nbytes = sum(count * message.nbytes * crossing_share(message.span.ranks, message.span.node)
                 for messages, count, *_ in exchanges for message in messages)
    ranks, near, _ = plan.span("expert", machine)
    return ExpertTraffic(domain, crossing_share(ranks, near), often * nbytes,
                         often * exchange_seconds(exchanges, machine, constants),
                         step_time(model, plan, machine, constants).total)


def published_domains(name="DeepSeekV3", precision="mxfp8", gpus=256):
    """Return [(release, node's Job, rack's Job)] of Megatron-Bridge, the oldest release first: the
    same model and precision on as many B200s in nodes of 8 and GB200s in racks of 72.
    """
    families = {}
    for run, job in with_jobs(all_runs()):
        release = re.search(r"Megatron-Bridge.* release (\S+)", run.source)
        if release and job.seconds and job.name == name and job.plan.gpus == gpus and (
                job.plan.precision == precision):
            families.setdefault(release[1], {})[job.machine.family] = job
    return [(release, kinds["B200"], kinds["GB200"]) for release, kinds in sorted(families.items())
            if {"B200", "GB200"} <= set(kinds)]
