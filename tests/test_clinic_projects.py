"""`ranklab diagnose` calls no solved project sick, and names what was left out of one."""

import os
import re
import subprocess
import sys

import pytest

from ranklab.course import labs

pytestmark = pytest.mark.timeout(300)
FEWER = {  # steps than on a laptop, but enough for each detector
    "expert_parallel": "--steps 10 --no-compare",
    "hybrid": "--steps 6 --no-compare --layout 2x1x2,zero",
    "ranks": "", "collectives": "--sizes 1K --iters 1", "data_parallel": "--epochs 1",
    "ddp": "--epochs 1 --images 512", "horovod": "--steps 12", "zero": "--steps 10",
    "fsdp": "--pretrain 4 --steps 10", "tensor_parallel": "--steps 6",
    "pipeline_parallel": "--steps 8 --no-compare", "context_parallel": "--steps 10 --no-compare",
    "planner": "measure", "resilience": "--faults 0", "cluster": "",
}
BY_ITSELF = {"baseline", "clinic"}  # one process; programs that are observed one by one
HEALTHY = "none of the known diseases is seen"
CUT = {"cluster"}  # it cuts the link of ranks that train nothing: they end without a step
WITHOUT = {"shard": "same_data", "mean": "wrong_reduction", "broadcast": "unsynchronised_start"}


def diagnosed(*words):
    """(exit code, what is printed)"""
    done = subprocess.run([sys.executable, "-m", "ranklab.cli", "diagnose", *words], text=True,
                          capture_output=True, timeout=280,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})
    return done.returncode, done.stdout + done.stderr


@pytest.mark.sweep
@pytest.mark.parametrize("name", FEWER)
def test_a_solved_project_has_none_of_the_diseases(name):
    code, printed = diagnosed(f"ranklab.projects.{name}", *FEWER[name].split())
    runs = re.findall(r"(\d+) ranks, (\d+) steps .*: (.*)", printed)
    without_step = [(steps, sentence) for _, steps, sentence in runs if sentence != HEALTHY]
    assert code == 0 and len(runs) > len(without_step), printed
    assert without_step == [
        ("0", "it did not come to a step, so most diseases could not be seen")
    ] * (name in CUT), printed
    assert max(int(ranks) for ranks, _, _ in runs) > 1


@pytest.mark.sweep
@pytest.mark.parametrize("piece", WITHOUT)
def test_what_was_left_out_of_a_project_is_named(piece):
    code, printed = diagnosed("ranklab.projects.data_parallel", "--without", piece, "--epochs", "1")
    assert code == 1 and f"\n  {WITHOUT[piece]}\n" in printed, printed


def test_each_project_is_here_and_one_process_is_no_run_of_ranks():
    stems = {stem.partition("_")[2] for stem in labs.written()}
    assert stems == BY_ITSELF | FEWER.keys()
    code, printed = diagnosed("ranklab.projects.baseline", "--steps", "1")
    assert code == 2 and "no ranks were observed: no process that it started" in printed, printed
