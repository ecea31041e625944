"""The same script on the real Horovod and on ranklab.horovod: the same numbers."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ranklab.engine import torchrun
from ranklab.horovod.trace import read_timeline

SCRIPT = Path(__file__).with_name("horovod_script.py")
HOROVODRUN = (Path(sys.executable).with_name("horovodrun"), "--gloo", "--network-interfaces", "lo")
MPIRUN = "mpirun", "--allow-run-as-root", "--oversubscribe"

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("horovod") is None,
                       reason="needs horovod: make horovod builds it"),
    pytest.mark.timeout(400),
]


def on_both(folder, launcher, ranks, *what):
    """[(what a rank saw on Horovod, on ranklab.horovod), ...]; timelines lie in `folder`."""
    for name in ("theirs", "ours"):
        (folder / name).mkdir()
    environ = {"OMP_NUM_THREADS": "1", **os.environ,
               "HOROVOD_TIMELINE": str(folder / "theirs.trace")}
    command = *launcher, "-np", ranks, sys.executable, SCRIPT, "horovod.torch", folder / "theirs"
    done = subprocess.run([*map(str, (*command, *what))], capture_output=True, text=True,
                          timeout=200, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOROVOD_TIMELINE", str(folder / "ours.trace"))
        torchrun(SCRIPT, "ranklab.horovod", folder / "ours", *what, ranks=ranks, timeout=200)
    return [[json.loads((folder / name / f"{r}.json").read_text()) for name in ("theirs", "ours")]
            for r in range(ranks)]


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    return on_both(tmp_path_factory.mktemp("horovod"), HOROVODRUN, 2)


def flat(value):
    """The numbers in it, one after the other."""
    value = list(value.values()) if isinstance(value, dict) else value
    return [x for part in value for x in flat(part)] if isinstance(value, list) else [value]


@pytest.mark.parametrize("what, rel", [("verbs", 1e-6), ("wrong", 0), *(
    (how, 1e-3) for how in ("plain", "fp16", "twice", "predivided"))])
def test_verbs_errors_losses_and_weights_are_the_same(both, what, rel):
    for theirs, ours in both:
        assert flat(ours[what]) == pytest.approx(flat(theirs[what]), rel=rel)
        # Horovod counts a step when it broadcasts Adam's state, and we do not.
        assert (theirs["adam's steps"], ours["adam's steps"]) == ([1.0], [])


def test_timelines_have_the_same_phases(both, tmp_path_factory):
    wanted = {"NEGOTIATE_ALLREDUCE", "ALLREDUCE", "NEGOTIATE_BROADCAST", "BROADCAST",
              "GLOO_ALLREDUCE"}
    traces = [*tmp_path_factory.getbasetemp().glob("horovod*/*.trace")]
    assert len(traces) == 2
    for trace in traces:
        found = {phase.name for phase in read_timeline(trace) if phase.tensor.endswith("0.weight")}
        assert wanted <= found, trace.name


def test_adasum_is_the_same(tmp_path):
    import horovod.torch

    if not (shutil.which("mpirun") and horovod.torch.mpi_built()):
        pytest.skip("needs an MPI library when horovod is built: without it there is no Adasum")
    for theirs, ours in on_both(tmp_path, MPIRUN, 4, "adasum"):
        assert flat(ours["adasum"]) == pytest.approx(flat(theirs["adasum"]), rel=1e-4, abs=1e-5)
