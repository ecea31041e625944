"""Run the same script under the real torchrun on this machine, to show that nothing changes."""

import contextlib
import itertools
import os
import subprocess
import sys

from ranklab.engine import sharing

ELASTIC = "torch/distributed/elastic"  # marks torchrun's own output, which follows the ranks'


def torchrun(*command, ranks, timeout=120):
    """Run `torchrun --nproc-per-node RANKS COMMAND...`; return its output.

    The ranks see GPUs if there is one for each of them or they share, as under launch.
    Raises: RuntimeError with the ranks' last lines; TimeoutError, after its processes are killed.
    Lab: 00
    """
    import psutil  # imported here, not in every rank
    import torch

    line = [sys.executable, "-m", "torch.distributed.run", "--standalone",
            f"--nproc-per-node={ranks}", *map(str, command)]
    # Otherwise torchrun sets it too, with six lines of warning.
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
            if process.poll() is None:  # after Ctrl-C as well; each rank has its own session
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
