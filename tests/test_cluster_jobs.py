"""Lab 15: jobs as files. What they do is in the checks; here are the tools that know them."""

import json
import shutil
import subprocess
import time
from dataclasses import replace

import pytest

from ranklab.checks.cluster import slurm_stub
from ranklab.checks.cluster.batch_run import header, minutes, run
from ranklab.checks.cluster.manifest import LARGE, SMALL
from ranklab.checks.cluster.sbatch import gpus
from ranklab.checks.exercise import Mistake
from ranklab.cluster.job import Job
from ranklab.cluster.manifest import invalid, train_job_manifest
from ranklab.cluster.sbatch import sbatch_script
from ranklab.cluster.storage import EFS, LUSTRE, S3, TECTONIC, Load, storage_plan


@pytest.mark.parametrize("text, right", [
    ("90", 90), ("90:30", 90.5), ("1:30:00", 90), ("1-1", 1500), ("2-0:30", 2910),
    ("1-01:30:00", 1530)])
def test_times_are_read_as_sbatch_reads_them(text, right):
    assert minutes(text) == right


def test_options_are_read_as_sbatch_reads_them():
    script = ("#!/bin/bash\n#SBATCH -N2 --time 5 --requeue  # twice\n# no\n\n"
              "#SBATCH -J 'a b' --gres=gpu:h100:4\n")
    assert header(script) == {"nodes": "2", "time": "5", "requeue": "", "job-name": "a b",
                              "gres": "gpu:h100:4"}
    assert [gpus(each, 2) for each in ({"gres": "gpu:4"}, {"gpus": "8"}, {"gpus-per-node": "a:3"},
                                       {"gres": "gpu"})] == [4, 4, 3, 0]
    for line in ("#SBATCH --nods=2", "#SBATCH -N $NODES", "cd /\n#SBATCH -N 2"):
        with pytest.raises(Mistake):
            header(f"#!/bin/bash\n{line}\n")


def test_hosts_and_options_of_the_stand_ins():
    assert list(slurm_stub.hosts("gpu[07,12-13],big2")) == ["gpu07", "gpu12", "gpu13", "big2"]
    assert slurm_stub.options(["-K1", "-n", "2", "--label", "--wait=5", "sh", "-c", "x"]) == (
        {"kill-on-bad-exit": "1", "ntasks": "2", "label": "", "wait": "5"}, ["sh", "-c", "x"])


def test_a_script_that_hangs_is_ended_and_leaves_no_process():
    job, script = Job("x", 2, 1, ("a.py",)), "#!/bin/bash\nsrun torchrun a.py\n"
    ran = run(script, job, waits=True, signalled="B:USR2@60")  # the batch shell ends at once
    assert ran.code == -12 and len(ran.of("torchrun")) == 2
    sessions = ",".join(str(task["group"]) for task in ran.of("task"))
    for _ in range(50):
        states = subprocess.run(["ps", "-o", "stat=", "-s", sessions], capture_output=True,
                                text=True)
        left = [state for state in states.stdout.split() if "Z" not in state]
        if not left:
            break
        time.sleep(0.1)
    assert not left


def test_scripts_are_fine_for_shellcheck_and_bash():
    for job in (LARGE, SMALL, replace(SMALL, image="")):
        text = sbatch_script(job)
        assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
        if shutil.which("shellcheck"):
            done = subprocess.run(["shellcheck", "-"], input=text, text=True, capture_output=True)
            assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("kind", ["TrainJob", "JobSet"])
def test_schemas_refuse_types_and_unknown_fields_everywhere(kind):
    manifest = train_job_manifest(LARGE, kind)
    assert invalid(manifest) == []
    places = list(nested(manifest))
    assert len(places) > 8
    for number in range(len(places)):
        spoilt = json.loads(json.dumps(manifest))
        list(nested(spoilt))[number]["unknown"] = 1
        assert invalid(spoilt), places[number]
    assert invalid({**manifest, "apiVersion": "v1"}) and invalid({"kind": "Job"}) and invalid([])


def nested(part):
    """Every dict in it but those of free keys."""
    if isinstance(part, dict):
        yield part
    for key, inner in part.items() if isinstance(part, dict) else enumerate(part):
        if isinstance(inner, (dict, list)) and key not in ("limits", "requests"):
            yield from nested(inner)


def test_what_published_systems_do_with_llama_3():
    """Tectonic's 2 TB/s take its 5.7 TB in 3 s; the paper's 4 GB a GPU at most are kept."""
    load = Load(2048, 8, 25e9, 14 * 405.85e9, 1200.0)
    assert 1e6 < load.checkpoint / (load.nodes * load.gpus) < 4e9
    plans = {system: storage_plan(load, system) for system in (TECTONIC, EFS, LUSTRE, S3)}
    assert [plan.save_bound for plan in plans.values()] == ["file system"] * 3 + ["metadata"]
    assert plans[TECTONIC].save_seconds == pytest.approx(2.84, rel=0.01)
    one = storage_plan(replace(load, writers="one"), TECTONIC)
    assert one.save_bound == "link" and one.save_seconds == pytest.approx(227, rel=0.01)
    with pytest.raises(ValueError, match="copies=3 must divide 16384 ranks"):
        replace(load, copies=3)
