"""What every node of a cluster runs, whoever started it: torchrun, with all its GPUs (lab 15).

python labs/jobs/agent.py              # a GPT of 70 billion parameters on 256 GPUs of 80 GB
HOSTS="node1 node2" NODE=0 RANKS=1 OPTIONS="--size laptop --layout 2x1x1" python labs/jobs/agent.py

A node must know all hosts, in one order, and its own place among them; each system has its own way
to say so. CHECKPOINT is a folder that all nodes share: each start goes on from what is there.
Slurm and Kubernetes need no such script: see cluster.sbatch and ranklab.cluster.manifest.
"""

import json
import os
import sys
from pathlib import Path

SAGEMAKER = Path("/opt/ml/input/config/resourceconfig.json")
LARGE = "--size 100b --shape 80x8192x64x4096x128256 --layout 4x8x8,zero,sp,recompute"


def nodes(environ, sagemaker=SAGEMAKER):
    """(hosts, the place of this one or None, the port at the first where all meet).

    source  SkyPilot's docs, "Distributed Multi-Node Jobs"; the API's comments on requireHostsFile
            for Google's Batch, which says nothing of the order of its file: there torchrun looks
            for the host's own name; Vertex AI's docs, "Distributed training"; SageMaker's, "How
            Amazon SageMaker Provides Training Information"
    error   LookupError where there is none of them
    """
    port = int(environ.get("PORT", 29400))
    if "HOSTS" in environ:
        return environ["HOSTS"].split(), int(environ["NODE"]), port
    if "SKYPILOT_NODE_IPS" in environ:
        hosts = environ["SKYPILOT_NODE_IPS"].split()
        return hosts, int(environ["SKYPILOT_NODE_RANK"]), port
    if "BATCH_HOSTS_FILE" in environ:
        return Path(environ["BATCH_HOSTS_FILE"]).read_text().split(), None, port
    if "CLUSTER_SPEC" in environ:
        spec = json.loads(environ["CLUSTER_SPEC"])
        pools, task = spec["cluster"], spec["task"]
        hosts = [host for pool in sorted(pools) for host in pools[pool]]
        here = hosts.index(pools[task["type"]][int(task["index"])])
        return [each.partition(":")[0] for each in hosts], here, int(hosts[0].partition(":")[2])
    if sagemaker.exists():
        config = json.loads(sagemaker.read_text())
        return config["hosts"], config["hosts"].index(config["current_host"]), port
    raise LookupError("no node is named: set HOSTS and NODE, as in this file's first lines")


def torchrun(environ, sagemaker=SAGEMAKER):
    """The command line of this node."""
    hosts, here, port = nodes(environ, sagemaker)
    line = ["torchrun", f"--nnodes={len(hosts)}", f"--nproc-per-node={environ.get('RANKS', 'gpu')}",
            "--max-restarts=10", "--rdzv-backend=c10d", "--rdzv-id=ranklab",
            f"--rdzv-endpoint={hosts[0]}:{port}"]
    if here is not None:
        line += [f"--local-addr={hosts[here]}", f"--rdzv-conf=is_host={int(here == 0)}"]
    return [*line, __file__]


def rank(environ):
    """The command line of a rank: the project of lab 12, from the last checkpoint on."""
    folder = Path(environ.get("CHECKPOINT", "build/agent"))
    line = [sys.executable, "-m", "ranklab.projects.hybrid", *environ.get("OPTIONS", LARGE).split(),
            "--checkpoint", str(folder), "--checkpoint-every", environ.get("EVERY", "50")]
    return line + ["--resume"] * any(folder.glob("*/index.json"))


if __name__ == "__main__":
    line = rank(os.environ) if "LOCAL_RANK" in os.environ else torchrun(os.environ)
    # As cluster.sbatch says: where restarted ranks meet, and the seconds of a save after a SIGTERM.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "800")
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    os.execvp(line[0], line)  # what follows gets the signals
