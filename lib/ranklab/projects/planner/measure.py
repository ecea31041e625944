"""measure: the speeds of this machine's GPUs and links, as a node file for `ranklab plan --on`."""

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist

from ranklab import hardware
from ranklab.collectives.hierarchical import node_groups
from ranklab.engine import device, is_main_process, launch, sharing
from ranklab.engine.report import count_ranks
from ranklab.planner.links import CARDS, bus_of, link_of
from ranklab.planner.machine import Machine
from ranklab.projects.clock import best_seconds

MEGABYTES = {"cpu": 8, "cuda": 512}  # of an all-reduce
ROUNDS = 5


def measure(ranks=None, nodes=1):
    """Return the Machine, measured on the ranks of this job, or on `ranks` ranks started here.

    bf16, memory_bandwidth  from the fastest matrix product and the fastest copy
    link, network  such that the planner predicts the measured bus bandwidth of a large all-reduce;
                   with one node the network is assumed to be the link
    """
    return launch(_measured, ranks=ranks, nodes=nodes, timeout=300)[0]


def _measured():
    if sharing.share_of_gpu() < 1:
        raise ValueError("ranks share a GPU here, so no time of theirs is a GPU's: measure with "
                         "as many ranks as there are GPUs")
    place, per_node = device(), int(os.environ["LOCAL_WORLD_SIZE"])
    spec = hardware.present(place)
    gpu = place.type == "cuda" and hardware.find(torch.cuda.get_device_name())
    speeds = hardware.measured(place, spec.name) if gpu else spec
    bus = _bus_bandwidth(node_groups(per_node)[0], place)
    network = bus
    if per_node < dist.get_world_size():
        network = _bus_bandwidth(None, place) / (per_node * CARDS)
    return Machine(
        name=spec.name, accelerator=spec.name, peak_flops=spec.bf16_flops, bf16=speeds.bf16_flops,
        fp8=0.0, fp4=0.0, peak_fp8=0.0, memory_bytes=speeds.memory_bytes,
        memory_bandwidth=speeds.memory_bandwidth, node=per_node, link=link_of(bus, per_node),
        network=network)


def _bus_bandwidth(group, place):
    """Return the bytes/s of each rank in the fastest of several all-reduces; 1e15 on one rank."""
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return 1e15
    x = torch.ones(MEGABYTES[place.type] * 250_000, device=place)
    seconds = best_seconds(lambda: dist.all_reduce(x, group=group), ROUNDS)
    return 2 * (ranks - 1) / ranks * x.nbytes / seconds


def measure_report(ranks=None, write=None):
    """Measure this machine; return the results as text.

    write: the path of a node file for the results
    """
    machine = measure(ranks)
    if write and is_main_process():
        Path(write).parent.mkdir(parents=True, exist_ok=True)
        Path(write).write_text(json.dumps(vars(machine), indent=1) + "\n")
    return "\n".join([
        f"{machine.name}, {count_ranks(machine.node)} in a node",
        f"matrix products   {machine.bf16 / 1e12:10.3f} TFLOP/s, of a peak of "
        f"{machine.peak_flops / 1e12:.3f}",
        f"memory            {machine.memory_bandwidth / 1e9:10.1f} GB/s, "
        f"{machine.memory_bytes / 1e9:.1f} GB",
        f"all-reduce        {bus_of(machine.link, machine.node) / 1e9:10.2f} GB/s in a node, "
        "each rank",
        *[f"written to {write}: ranklab plan --on {write} ..."] * bool(write)])
