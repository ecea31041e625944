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
BIN = Path(sys.executable).parent

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("horovod") is None,
                       reason="needs horovod: make horovod builds it"),
    pytest.mark.timeout(400),
]


def run(*command, **environ):
    """The command has ended well."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=200,
                          env={"OMP_NUM_THREADS": "1", **os.environ, **environ})
    assert done.returncode == 0, done.stdout + done.stderr


def read(folder, ranks):
    return [json.loads((folder / f"{r}.json").read_text()) for r in range(ranks)]


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """What the ranks saw: (on Horovod, on ranklab.horovod), and the folder with their timelines."""
    folder = tmp_path_factory.mktemp("horovod")
    for name in ("theirs", "ours"):
        (folder / name).mkdir()
    run(BIN / "horovodrun", "--gloo", "--network-interfaces", "lo", "-np", "2", sys.executable,
        SCRIPT, "horovod.torch", folder / "theirs", HOROVOD_TIMELINE=str(folder / "theirs.trace"))
    os.environ["HOROVOD_TIMELINE"] = str(folder / "ours.trace")
    try:
        torchrun(SCRIPT, "ranklab.horovod", folder / "ours", ranks=2, timeout=200)
    finally:
        del os.environ["HOROVOD_TIMELINE"]
    return read(folder / "theirs", 2), read(folder / "ours", 2), folder


def flat(value):
    return [x for part in value for x in flat(part)] if isinstance(value, list) else [value]


@pytest.mark.parametrize("what", ["average", "sum", "min", "max", "scaled", "whole", "fp16",
                                  "async", "rows", "broadcast", "grouped", "in place"])
def test_verbs_give_the_same(both, what):
    for theirs, ours in zip(*both[:2]):
        assert flat(ours["verbs"][what]) == pytest.approx(flat(theirs["verbs"][what]), rel=1e-6)


def test_places_objects_and_errors_are_the_same(both):
    for theirs, ours in zip(*both[:2]):
        for what in ("object", "place"):
            assert ours["verbs"][what] == theirs["verbs"][what]
        assert ours["wrong"] is theirs["wrong"] is True


@pytest.mark.parametrize("what", ["plain", "fp16", "twice", "predivided"])
def test_loss_curves_and_weights_are_the_same(both, what):
    for theirs, ours in zip(*both[:2]):
        assert ours[what][0] == pytest.approx(theirs[what][0], rel=1e-4)
        assert ours[what][1] == pytest.approx(theirs[what][1], rel=1e-3)
        assert theirs[what][0][-1] < theirs[what][0][0]


def test_horovod_counts_a_step_when_it_broadcasts_adams_state_and_we_do_not(both):
    for theirs, ours in zip(*both[:2]):
        assert (theirs["adam's steps"], ours["adam's steps"]) == ([1.0], [])


def test_timelines_have_the_same_rows_and_phases(both):
    phases = {}
    for name in ("theirs", "ours"):
        trace = json.loads((both[2] / f"{name}.trace").read_text())
        events = trace["traceEvents"] if isinstance(trace, dict) else trace
        rows = {e["pid"]: e["args"]["name"] for e in events
                if e["ph"] == "M" and "name" in e.get("args", {})}
        phases[name] = {e["name"] for e in events if e["ph"] in "BX"
                        and rows.get(e["pid"], "").endswith("0.weight")}
    wanted = {"NEGOTIATE_ALLREDUCE", "ALLREDUCE", "NEGOTIATE_BROADCAST", "BROADCAST",
              "GLOO_ALLREDUCE"}
    assert wanted <= phases["ours"] and wanted <= phases["theirs"], phases


@pytest.mark.parametrize("ranks", [4])
def test_adasum_is_the_same(tmp_path, ranks):
    import horovod.torch

    if not (shutil.which("mpirun") and horovod.torch.mpi_built()):
        pytest.skip("needs an MPI library when horovod is built: without it there is no Adasum")
    for name in ("theirs", "ours"):
        (tmp_path / name).mkdir()
    run("mpirun", "--allow-run-as-root", "--oversubscribe", "-np", ranks, sys.executable, SCRIPT,
        "horovod.torch", tmp_path / "theirs", "adasum")
    torchrun(SCRIPT, "ranklab.horovod", tmp_path / "ours", "adasum", ranks=ranks, timeout=200)
    for theirs, ours in zip(read(tmp_path / "theirs", ranks), read(tmp_path / "ours", ranks)):
        for one, other in zip(theirs["adasum"], ours["adasum"]):
            assert flat(other) == pytest.approx(flat(one), rel=1e-4, abs=1e-5)
