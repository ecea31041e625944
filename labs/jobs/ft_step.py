"""A stopped rank is named by its monitor, and all start again: nvidia-resiliency-ext (lab 14).

pip install -c constraints.txt -e '.[resilience]'
python labs/jobs/ft_step.py               # starts ft_launcher, which starts two ranks
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from ranklab.engine import launch
from ranklab.engine.in_place import make_group
from ranklab.engine.surroundings import patience
from ranklab.peers.torch_elastic import train

BEAT, TIMEOUT = 0.2, 3  # seconds: between heartbeats; without one, on an idle machine
NAMED = r"RankMonServer\d+@\S*:(\d+)\] Did not get subsequent heartbeat. Waited ([\d.]+) seconds"


def rank(folder):
    """A rank of ft_launcher. A thread beats, so that a rank that waits for others is not taken for
    one that hangs. But it also beats where only the training hangs: here the process is stopped.
    """
    from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

    client = RankMonitorClient()
    client.init_workload_monitoring()

    def beat():
        while not over.wait(BEAT):
            client.send_heartbeat()

    over, thread = threading.Event(), threading.Thread(target=beat, daemon=True)
    thread.start()
    make_group()
    found = train(folder, fault=signal.SIGSTOP)
    over.set()
    thread.join()
    client.shutdown_workload_monitoring()
    if os.environ["RANK"] == "0":
        Path(folder, "found.json").write_text(json.dumps(found))


def main():
    with tempfile.TemporaryDirectory() as folder:
        usual, folder = launch(train, Path(folder, "usual"), ranks=2)[0], Path(folder)
        line = [Path(sys.executable).with_name("ft_launcher"), "--standalone",
                "--nproc-per-node=2", "--max-restarts=1", "--ft-workload-check-interval=0.5",
                f"--ft-rank-heartbeat-timeout={TIMEOUT * patience()}",
                "--ft-initial-rank-heartbeat-timeout=60", __file__, folder]
        environ = {**os.environ, "OMP_NUM_THREADS": "1",
                   "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # as in ranklab.peers.torch_elastic
        launcher = subprocess.Popen(line, env=environ, stderr=subprocess.PIPE, text=True)
        log = []
        for text in launcher.stderr:
            log.append(text)
            if named := re.search(NAMED, text):
                after = time.time() - (folder / "struck").stat().st_mtime
                print(f"rank {named[1]} is named after {named[2]} s without a heartbeat, "
                      f"{after:.1f} s after SIGSTOP")
        if launcher.wait():
            print("".join(log)[-4000:])
            return 1
        found = json.loads((folder / "found.json").read_text())
    print(f"restarts {found['restarts']}, began at step {found['began']}")
    print(f"loss {found['loss']:.9f}, undisturbed {usual['loss']:.9f}")
    return 0


if __name__ == "__main__":
    sys.exit(rank(sys.argv[1]) if len(sys.argv) > 1 else main())
