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
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("horovod")


@pytest.fixture(scope="module")
def both(folder):
    return on_both(folder, HOROVODRUN, 2)


def flat(value):
    return [x for part in value for x in flat(part)] if isinstance(value, list) else [value]


def test_verbs_places_objects_and_errors_are_the_same(both):
    for theirs, ours in both:
        assert ours["wrong"] is theirs["wrong"] is True
        assert ours["verbs"].pop("object") == theirs["verbs"].pop("object")
        assert ours["verbs"].keys() == theirs["verbs"].keys()
        for what, value in theirs["verbs"].items():
            assert flat(ours["verbs"][what]) == pytest.approx(flat(value), rel=1e-6), what


@pytest.mark.parametrize("what", ["plain", "fp16", "twice", "predivided"])
def test_loss_curves_and_weights_are_the_same(both, what):
    for theirs, ours in both:
        assert ours[what][0] == pytest.approx(theirs[what][0], rel=1e-4)
        assert ours[what][1] == pytest.approx(theirs[what][1], rel=1e-3)
        assert theirs[what][0][-1] < theirs[what][0][0]


def test_horovod_counts_a_step_when_it_broadcasts_adams_state_and_we_do_not(both):
    for theirs, ours in both:
        assert (theirs["adam's steps"], ours["adam's steps"]) == ([1.0], [])


def test_timelines_have_the_same_rows_and_phases(both, folder):
    wanted = {"NEGOTIATE_ALLREDUCE", "ALLREDUCE", "NEGOTIATE_BROADCAST", "BROADCAST",
              "GLOO_ALLREDUCE"}
    for name in ("theirs", "ours"):
        trace = json.loads((folder / f"{name}.trace").read_text())
        events = trace["traceEvents"] if isinstance(trace, dict) else trace
        rows = {e["pid"]: e["args"]["name"] for e in events
                if e["ph"] == "M" and "name" in e.get("args", {})}
        phases = {e["name"] for e in events if e["ph"] in "BX"
                  and rows.get(e["pid"], "").endswith("0.weight")}
        assert wanted <= phases, name


def test_adasum_is_the_same(tmp_path):
    import horovod.torch

    if not (shutil.which("mpirun") and horovod.torch.mpi_built()):
        pytest.skip("needs an MPI library when horovod is built: without it there is no Adasum")
    for theirs, ours in on_both(tmp_path, MPIRUN, 4, "adasum"):
        assert flat(ours["adasum"]) == pytest.approx(flat(theirs["adasum"]), rel=1e-4, abs=1e-5)
