"""Lab 15: the table of systems is honest, and job files are what their tools take."""

import json
import os
import re
import subprocess
import sys

import pytest
import yaml
from conftest import ROOT, repository_files
from test_engine_scripts import free_port

from ranklab.cluster.systems import systems, table
from ranklab.trainer import History

JOBS = ROOT / "labs" / "jobs"
sys.path.insert(0, str(JOBS))
import agent  # noqa: E402
import validate  # noqa: E402

NAMED = """Slurm TrainJob JobSet Ray SkyPilot ParallelCluster SageMaker Batch Vertex Docker NGC pyxis
elastic DCP torchft resiliency-ext Prometheus Alertmanager Grafana TensorBoard Weights DCGM NVTX
Nsight.Systems Nsight.Compute NFS Lustre InfiniBand RoCE""".split()  # by the syllabus


def test_every_system_is_in_the_table_with_a_proof_that_exists():
    assert not [name for name in NAMED if not re.search(name, table())]
    assert max(map(len, table().splitlines())) <= 100
    for each in systems():
        path, _, word = each["proof"].partition("::")
        assert each["how"] == "not run" or each["how"] in ("run", "validated") and path, each
        assert {path or "Makefile", each["file"] or "Makefile"} <= {
            *repository_files(), "make slurm"}, each
        if word:
            word = f"def {word}(" if path.startswith("tests/") else word
            assert word in (ROOT / path).read_text(), each


@pytest.mark.parametrize("name", validate.TOOLS)
def test_its_own_tool_takes_a_job_file_and_refuses_a_slip(name):
    (check, package), text = validate.TOOLS[name], (ROOT / name).read_text()
    line, = [each for each in systems() if each["file"] == name and each["how"] == "validated"]
    version = re.search(rf"{package} ([\d.]*\d),", line["with"])[1]
    assert name.startswith(".github") or version in text.split("\n\n")[0]
    if validate.missing(name):
        pytest.skip(validate.missing(name))
    assert not check(text)
    assert check(text + ("\nFORM x\n" if name == "Dockerfile" else "\nunknown_field: 1\n"))


def test_all_job_files_train_the_same_gpt_and_know_their_node(tmp_path):
    for name in ("skypilot", "sagemaker", "gcp_batch", "vertex_ai"):
        text = (JOBS / f"{name}.yaml").read_text()
        assert agent.LARGE in str(yaml.safe_load(text)) and "labs/jobs/agent.py" in text, name
    assert agent.LARGE in (JOBS / "cluster.sbatch").read_text()
    (tmp_path / "hosts").write_text("a\nb\n")
    (tmp_path / "config").write_text(json.dumps({"hosts": ["a", "b"], "current_host": "b"}))
    spec = {"cluster": {"workerpool0": ["a:2222"], "workerpool1": ["b:2222"]},
            "task": {"type": "workerpool1", "index": 0}}
    found = [agent.nodes(environ, tmp_path / "config") for environ in (
        {"HOSTS": "a b", "NODE": "1"}, {"SKYPILOT_NODE_IPS": "a\nb", "SKYPILOT_NODE_RANK": "1"},
        {"CLUSTER_SPEC": json.dumps(spec)}, {}, {"BATCH_HOSTS_FILE": str(tmp_path / "hosts")})]
    assert [each[:2] for each in found] == [(["a", "b"], 1)] * 4 + [(["a", "b"], None)]
    assert [each[2] for each in found] == [29400, 29400, 2222, 29400, 29400]


@pytest.mark.timeout(200)
def test_two_hosts_train_and_go_on_from_their_checkpoint(tmp_path):
    """Two addresses of this machine, with SkyPilot's variables, twice."""
    for steps in (5, 8):
        given = {"SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2", "PORT": str(free_port()), "EVERY": "5",
                 "RANKS": "1", "OMP_NUM_THREADS": "1", "CHECKPOINT": str(tmp_path), "OPTIONS":
                 f"--shape 2x32x4x32x256 --layout 2x1x1,zero --steps {steps} --no-compare"}
        hosts = [subprocess.Popen([sys.executable, JOBS / "agent.py"], text=True, env=os.environ
                                  | given | {"SKYPILOT_NODE_RANK": rank}, stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT) for rank in "01"]
        said = [host.communicate(timeout=90)[0] for host in hosts]
        assert f"{steps} steps of" in said[0] and not any(host.returncode for host in hosts), said
        assert [*tmp_path.glob(f"step-00000{steps}*/index.json")]


@pytest.mark.timeout(200)
def test_ray_starts_again_after_a_worker_was_killed():
    pytest.importorskip("ray", reason="needs ray: pip install 'ray[train]'")
    done = subprocess.run([sys.executable, JOBS / "ray_train.py"], capture_output=True, text=True,
                          timeout=180)
    assert "went on from step 5" in done.stdout, done.stdout + done.stderr
    found, usual = re.findall(r"\d\.\d{9}", done.stdout)
    assert found == usual


def test_wandb_writes_a_run_offline(tmp_path):
    pytest.importorskip("wandb", reason="needs wandb: pip install wandb")
    from ranklab.cluster.curves import write_wandb

    folder = write_wandb(tmp_path, History([1], [3.0], [0.0], [0.5], {1: 2.75}))
    assert [*folder.glob("run-*.wandb")]
