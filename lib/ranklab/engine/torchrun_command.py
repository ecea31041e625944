"""The same script under the real torchrun, on this machine: to show that nothing changes."""

import contextlib
import itertools
import os
import subprocess
import sys

from ranklab.engine import sharing

ELASTIC = "torch/distributed/elastic"  # torchrun's own words, after those of the ranks


def torchrun(*command, ranks, timeout=120):
    """Run `torchrun --nproc-per-node RANKS COMMAND...`; return what it printed.

    The ranks see GPUs if there is one for each of them or they share, as under launch.
    Raises: RuntimeError with what the ranks said last; TimeoutError, after its processes are ended.
    Lab: 00
    """
    import psutil  # set here, not in every rank
    import torch

    line = [sys.executable, "-m", "torch.distributed.run", "--standalone",
            f"--nproc-per-node={ranks}", *map(str, command)]
    # torchrun says this itself, in six lines of warning, when it is not set.
    environ = {"OMP_NUM_THREADS": "1", **os.environ}
    if torch.cuda.device_count() < ranks and not sharing.is_wanted():
        environ["CUDA_VISIBLE_DEVICES"] = ""
    with subprocess.Popen(line, env=environ, text=True, start_new_session=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"torchrun was not done after {timeout} s") from None
        finally:
            if process.poll() is None:  # also after Ctrl-C; each rank is in a session of its own
                agent = psutil.Process(process.pid)
                for one in [agent, *agent.children(recursive=True)]:
                    with contextlib.suppress(psutil.Error):  # it has just ended
                        one.kill()
    if process.returncode:
        lines = output.splitlines()
        of_ranks = [*itertools.takewhile(lambda line: ELASTIC not in line, lines)] or lines
        raise RuntimeError(f"torchrun ended with exit code {process.returncode}:\n"
                           + "\n".join(of_ranks[-20:]))
    return output
