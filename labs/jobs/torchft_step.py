"""Two replica groups that heal live, by torchft (lab 14): one dies, the other goes on without it,
and the next start of the dead one takes its weights from the living one; no checkpoint is read.

pip install -c constraints.txt -e '.[resilience]'
python labs/jobs/torchft_step.py          # starts a lighthouse and both groups, and kills one
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import tiny_step
import torch

DIES_AFTER, MORE, PACE = 10, 10, 0.05  # steps; steps after both are there again; seconds in a step


def new_manager(model, group):
    """Of a group of one rank."""
    import torchft

    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=20)), min_replica_size=1,
        load_state_dict=model.load_state_dict, state_dict=model.state_dict,
        replica_id=f"group{group}_", rank=0, world_size=1, hostname="127.0.0.1",
        store_addr="127.0.0.1", store_port=store.port, timeout=timedelta(seconds=60),
        quorum_timeout=timedelta(seconds=60))
    manager.kept = store  # as long as the manager
    return manager


def replica(group, folder):
    """One replica group, of one rank: all its steps."""
    import torchft

    torch.manual_seed(group)
    x, y = (torch.from_numpy(each[group::2]) for each in tiny_step.data())
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    manager = new_manager(model, group)  # group 0's weights, for all, in the first step
    forward = torchft.DistributedDataParallel(manager, model)
    sgd = torch.optim.SGD(model.parameters(), lr=tiny_step.LR / 10)
    optimizer, began, alone, longest = torchft.Optimizer(manager, sgd), None, 0, 0
    Path(folder, f"up-{group}").touch()
    while len([*Path(folder).glob("up-*")]) < 2:
        time.sleep(PACE)
    while not (healed := [*Path(folder).glob("healed-*")]) or (
            manager.current_step() < int(healed[0].name.partition("-")[2]) + MORE):
        before = time.monotonic()
        optimizer.zero_grad()  # asks for the quorum of this step
        loss = torch.nn.functional.cross_entropy(forward(x), y)
        loss.backward()
        optimizer.step()
        if began is not None:
            alone += manager.num_participants() == 1
            longest = max(longest, time.monotonic() - before)
        began = manager.current_step() if began is None else began
        if group == 1 and began > DIES_AFTER:
            Path(folder, f"healed-{began}").touch()
        elif group == 1 and manager.current_step() >= DIES_AFTER:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(PACE)
    total = sum(p.double().sum().item() for p in model.parameters())
    print(f"group {group}: steps {began} to {manager.current_step()}, {alone} of them alone, the "
          f"longest {longest:.1f} s; sum of weights {total:.12f}\n", end="", flush=True)
    manager.shutdown(wait=False)


def main():
    os.environ.setdefault("RUST_LOG", "error")
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=1000,
                                  heartbeat_timeout_ms=1000)
    port = lighthouse.address().rpartition(":")[2]
    environ = {**os.environ, "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}",
               "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder, open(Path(folder, "log"), "w+") as log:
        line = [sys.executable, __file__]
        groups = [subprocess.Popen([*line, str(n), folder], env=environ, stderr=log)
                  for n in range(2)]
        groups[1].wait()
        groups[1] = subprocess.Popen([*line, "1", folder], env=environ, stderr=log)
        codes = [each.wait() for each in groups]
        if any(codes):
            print(Path(folder, "log").read_text()[-4000:])
    lighthouse.shutdown()
    return any(codes)


if __name__ == "__main__":
    sys.exit(replica(int(sys.argv[1]), sys.argv[2]) if len(sys.argv) > 1 else main())
