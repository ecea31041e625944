"""Torch's own tools: DCP's async_save, which writes while training goes on, and torch elastic.

    async_beside_sync  lists the events between the call of a save and the end of its write
    train              trains on each rank from the last save; a rank may die
    elastic_losses     runs train under torchrun, which restarts dead ranks
    main               one such rank: python -m ranklab.peers.torch_elastic FOLDER STEPS

The scripts for torchft and nvidia-resiliency-ext are labs/jobs/torchft_step.py and ft_step.py.
"""

import json
import os
import signal
import sys
import threading
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from ranklab.basics.files import whole_file
from ranklab.engine import device, torchrun
from ranklab.engine.in_place import make_group

LIMIT = 60  # seconds
SAVE_EVERY, FAULT_AFTER = 4, 6  # steps


def new_model(width=512):
    """Make the same small network on all ranks."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, width), torch.nn.Tanh(),
                               torch.nn.Linear(width, 16)).to(device())


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def backward(model, optimizer, number, rank=0):
    """Compute the gradients of the loss on this rank's rows in step `number`; return the loss."""
    rows = torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * number + rank))
    rows = rows.to(device())
    loss = (model(rows) - rows).square().mean()
    optimizer.zero_grad()
    loss.backward()
    return loss


# --- DCP ------------------------------------------------------------------------------------------

def async_beside_sync(folder, steps=3, group=None):
    """Save with dcp.save and with dcp.async_save; return, on each rank, the order of events.

    An event is "called", "step", "written" or "returned". To fix their order, async_save's write
    waits until `steps` steps are done; with save() that would wait forever. FSDP2 shards a model
    and AdamW over the ranks of `group`. async_save has its own group, because its thread's
    collectives would mix with the collectives of the steps.
    Returns: {"sync": events, "async": events, "state": bytes,
    "as at the call": whether async_save has written the state at the time of its call}.
    """
    mesh = DeviceMesh.from_group(group or dist.group.WORLD, device().type)
    save_group = dist.new_group(dist.get_process_group_ranks(mesh.get_group()), backend="gloo")
    rank, model, report = mesh.get_rank(), new_model(), {}
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = adamw(model)

    def work(events):
        for number in range(steps):
            backward(model, optimizer, number, rank)
            optimizer.step()
            events.append("step")

    work([])
    for way in ("sync", "async"):
        writer, state = Writer(Path(folder, way)), dict(zip(("model", "optimizer"),
                                                            get_state_dict(model, optimizer)))
        before = {name: local(each).clone() for name, each in state["model"].items()}
        saved_by(way, writer, state, save_group, work)
        report[way] = writer.events
    report["state"] = sum(local(each).nbytes for each in tensors(state))
    dcp.load(state, checkpoint_id=Path(folder, "async"), process_group=save_group)
    report["as at the call"] = all(torch.equal(local(each), before[name])
                                   for name, each in state["model"].items())
    return report


class Writer(dcp.FileSystemWriter):
    """Write once the gate is open, and note the write as an event."""

    def __init__(self, place):
        super().__init__(place)
        self.gate, self.events = threading.Event(), ["called"]

    def write_data(self, plan, planner):
        self.gate.wait(LIMIT)
        written = super().write_data(plan, planner)
        written.wait()
        self.events.append("written")
        return written


def saved_by(way, writer, state, group, work):
    """Write the state and do the steps of `work`, in the order that `way` prescribes."""
    if way == "sync":
        writer.gate.set()
        dcp.save(state, storage_writer=writer, process_group=group)
    else:
        future = dcp.async_save(state, storage_writer=writer, process_group=group)
    writer.events.append("returned")
    work(writer.events)
    writer.gate.set()
    if way == "async":
        future.result(LIMIT)


def local(x):
    """Return this rank's part of a DTensor."""
    return (x.to_local() if hasattr(x, "to_local") else x).detach()


def tensors(tree):
    """List all tensors in nested dicts."""
    leaves = torch.utils._pytree.tree_leaves(tree)
    return [each for each in leaves if isinstance(each, torch.Tensor)]


# --- torch elastic --------------------------------------------------------------------------------

def elastic_losses(folder, steps=10, ranks=2):
    """Run train() under torchrun, with a SIGKILL of rank 1 on the way; return rank 0's result.

    Without the environment variable, restarted ranks would read the addresses of dead ones in the
    agent's store, and could not connect (torch 2.13, gloo).
    """
    with mock.patch.dict(os.environ, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"):
        torchrun("--max-restarts=2", "-m", "ranklab.peers.torch_elastic", folder, steps,
                 ranks=ranks, timeout=2 * LIMIT)
    return json.loads(Path(folder, "found.json").read_text())


def train(folder, steps=10, fault=None, group=None):
    """Train on each rank from the file of the last save to the last step.

    fault: a signal that rank 1 sends to itself once
    Returns: {"loss": of the last step, "began": steps done before this start,
    "restarts": number of restarts by torchrun}.
    """
    Path(folder).mkdir(exist_ok=True)
    rank, saved, struck = dist.get_rank(group), Path(folder, "saved.pt"), Path(folder, "struck")
    model, step = new_model(), 0
    optimizer = adamw(model)
    if saved.exists():
        state = torch.load(saved, map_location=device())
        step = state["step"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    began = step
    dist.barrier(group)  # all have read it
    while step < steps:
        if step == FAULT_AFTER and rank == 1 and fault and not struck.exists():
            struck.touch()
            os.kill(os.getpid(), fault)
        loss = backward(model, optimizer, step, rank)
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)
            p.grad /= dist.get_world_size(group)
        optimizer.step()
        step += 1
        if step % SAVE_EVERY == 0 and rank == 0:
            with whole_file(saved) as part:
                torch.save({"step": step, "model": model.state_dict(),
                            "optimizer": optimizer.state_dict()}, part)
    loss = loss.detach()
    dist.all_reduce(loss, group=group)
    return {"loss": loss.item(), "began": began,
            "restarts": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))}


def main(folder, steps):
    """Train on each rank under torchrun; rank 0 writes the result to found.json."""
    make_group()
    report = train(folder, steps, signal.SIGKILL)
    if dist.get_rank() == 0:
        Path(folder, "found.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
