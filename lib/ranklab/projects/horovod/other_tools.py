"""One data-parallel step by three tools, for projects.horovod: the scripts of labs/jobs."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from ranklab.collectives import mpi

NO_TENSORFLOW = ("TensorFlow is not here, and wants 1.5 GB: pip install tensorflow-cpu in an "
                 "environment of its own, and set TENSORFLOW_PYTHON to its bin/python")
NO_MPI = ("MPI is not here: apt install openmpi-bin, then "
          "pip install -c constraints.txt -e '.[mpi]'")


def run(ranks=4):
    """What each of the scripts printed, a line each; or what it needs to run."""
    return "\n".join(missing or run_script(command, name)
                     for name, (command, missing) in commands(ranks).items())


def commands(ranks):
    """{script: (the command before its name, what to install or None)}."""
    here = sys.executable
    tensorflow = here if find_spec("tensorflow") else os.environ.get("TENSORFLOW_PYTHON")
    return {
        "torch_step.py": ([here], None),
        "mpi_step.py": (["mpirun", "-n", str(ranks), here], None if mpi.is_here() else NO_MPI),
        "tf_mirrored_step.py": ([tensorflow], None if tensorflow else NO_TENSORFLOW),
    }


def run_script(command, name, timeout=120):
    """The line that labs/jobs/<name> printed; on failure the last line of what it said."""
    script = next((place / "labs" / "jobs" / name for place in (Path.cwd(), *Path.cwd().parents)
                   if (place / "labs" / "jobs").is_dir()), None)
    if script is None:
        return f"labs/jobs/{name} is in the course's checkout: start there"
    environ = {"OMP_NUM_THREADS": "1", **os.environ, **mpi.OPEN_MPI}
    done = subprocess.run([*command, script], env=environ, capture_output=True, text=True,
                          timeout=timeout)
    if done.returncode == 0:
        return done.stdout.strip()
    return f"{name} failed: {(done.stderr.strip() or 'it said nothing').splitlines()[-1]}"
