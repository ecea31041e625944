"""Two replica groups that heal live, by torchft (lab 14): one dies, the other goes on without it,
and the next start of the dead one takes its weights from the living one; no checkpoint is read.

pip install torchft-nightly
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

STEPS, DIES_AFTER, PACE = 80, 10, 0.1  # PACE: seconds in each step, so that the dead one can return


def replica(group, folder):
    """One replica group, of one rank: all its steps."""
    import torchft

    x, y = (torch.from_numpy(each[group::2]) for each in tiny_step.data())
    w1, w2 = (torch.from_numpy(each) for each in tiny_step.weights())
    model = torch.nn.Sequential(torch.nn.Linear(*w1.shape, bias=False), torch.nn.Tanh(),
                                torch.nn.Linear(*w2.shape, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(w1.T), model[2].weight.copy_(w2.T)
    sgd = torch.optim.SGD(model.parameters(), lr=tiny_step.LR)
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=10)), min_replica_size=1,
        load_state_dict=lambda state: model.load_state_dict(state), state_dict=model.state_dict,
        replica_id=f"group{group}_", rank=0, world_size=1, hostname="127.0.0.1",
        store_addr="127.0.0.1", store_port=store.port, timeout=timedelta(seconds=20),
        quorum_timeout=timedelta(seconds=60))
    forward, optimizer = torchft.DistributedDataParallel(manager, model), torchft.Optimizer(
        manager, sgd)
    began, alone, struck = None, 0, Path(folder, "struck")
    while manager.current_step() < STEPS:
        optimizer.zero_grad()  # asks for the quorum of this step
        loss = torch.nn.functional.cross_entropy(forward(x), y)
        loss.backward()
        optimizer.step()
        began = manager.current_step() if began is None else began
        alone += manager.num_participants() == 1
        if group == 1 and manager.current_step() >= DIES_AFTER and not struck.exists():
            struck.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(PACE)
    total = sum(p.double().sum().item() for p in model.parameters())
    print(f"group {group}: began at step {began}, {alone} steps alone, loss {loss.item():.5f}, "
          f"sum of weights {total:.9f}", flush=True)
    manager.shutdown(wait=False)


def main():
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=1000)
    port = lighthouse.address().rpartition(":")[2]
    environ = {**os.environ, "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}",
               "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        line = [sys.executable, __file__]
        groups = [subprocess.Popen([*line, str(n), folder], env=environ) for n in range(2)]
        if groups[1].wait() == -signal.SIGKILL:
            groups[1] = subprocess.Popen([*line, "1", folder], env=environ)
        codes = [each.wait() for each in groups]
    lighthouse.shutdown()
    return max(codes)


if __name__ == "__main__":
    sys.exit(replica(int(sys.argv[1]), sys.argv[2]) if len(sys.argv) > 1 else main())
