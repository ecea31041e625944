"""The same script under the real torchrun, on this machine: to show that nothing changes."""

import contextlib
import os
import subprocess
import sys


def torchrun(*command, ranks, timeout=120):
    """`torchrun --nproc-per-node RANKS COMMAND...` has run; returns what it printed.

    error  RuntimeError with its last lines; TimeoutError, and its processes are ended
    lab    00
    """
    import psutil  # set here, not in every rank

    line = [sys.executable, "-m", "torch.distributed.run", "--standalone",
            f"--nproc-per-node={ranks}", *map(str, command)]
    # torchrun says this itself, in six lines of warning, when it is not set.
    environ = {"OMP_NUM_THREADS": "1", **os.environ}
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
        raise RuntimeError(f"torchrun ended with exit code {process.returncode}:\n"
                           + "\n".join(output.splitlines()[-20:]))
    return output
