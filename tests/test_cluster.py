"""Lab 15: jobs as files. What they do is in the checks; here are the tools that know them."""

import json
import shutil
import subprocess
from dataclasses import replace

import pytest

from ranklab.checks.cluster import batch_run
from ranklab.checks.cluster.torchrun import LARGE, SMALL
from ranklab.cluster.manifest import invalid, train_job_manifest
from ranklab.cluster.sbatch import sbatch_script
from ranklab.cluster.storage import EFS, LUSTRE, S3, TECTONIC, Load, storage_plan


def test_options_are_read_as_sbatch_reads_them():
    script = ("#!/bin/bash\n#SBATCH --nodes 2 --time=5 --requeue  # twice\n  # no\n\n"
              "#SBATCH --job-name='a b'\ncd /\n#SBATCH --mem=0\n")
    assert batch_run.header(script) == {"--nodes": "2", "--time": "5", "--requeue": "",
                                        "--job-name": "a b"}


def test_a_script_that_does_not_end_is_ended(monkeypatch):
    monkeypatch.setattr(batch_run, "patience", lambda: 0.05)
    run = batch_run.run("#!/bin/bash\n(while :; do /bin/sleep 0.01777; done) &\nwait\n", SMALL)
    assert str(run.code).startswith("none after 10 s")
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert "sleep 0.01777" not in left


def test_scripts_are_fine_for_shellcheck_and_bash():
    for job in (LARGE, SMALL):
        text = sbatch_script(job)
        assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
        if shutil.which("shellcheck"):
            done = subprocess.run(["shellcheck", "--exclude=SC2016", "-"], input=text, text=True,
                                  capture_output=True)  # SC2016: the job's words keep their $
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
    one = storage_plan(replace(load, sharded=False), TECTONIC)
    assert one.save_bound == "link" and one.save_seconds == pytest.approx(227, rel=0.01)
    with pytest.raises(ValueError, match="copies=3 must divide 16384 ranks"):
        replace(load, copies=3)
