"""Every cell's claim to run on GPUs: all solutions run under a GPU's rules, on the CPU."""

import nbformat
import pytest
from conftest import ROOT

from ranklab.course import build, labs, rehearse
from ranklab.projects.horovod import trap as horovod_trap

# Cells that can't be rehearsed, by how they begin. One that can is a failure, too.
# DeepSpeed has a list of the devices that it knows
KNOWN = {"def their_losses(stage):", "def train_by_deepspeed():"}
if horovod_trap.is_here():
    # transformers' Trainer takes its device from accelerate, which knows no device "gpu": it moves
    # the model to the CPU
    KNOWN |= {"from ranklab.projects.horovod import trap as horovod_trap",
              "from ranklab.projects.fsdp import peers",
              "theirs, ours = peers.trainer_losses(4), peers.our_losses(4)"}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("stem", labs.written())
def test_a_solved_lab_runs_as_on_gpus(stem, tmp_path):
    solution = build.solution_notebook(ROOT, stem)
    nbformat.write(solution, tmp_path / "lab.ipynb")
    cells, errors = rehearse.run(tmp_path / "lab.ipynb")
    raised = [source.splitlines()[0] for _, source, _ in errors]
    known = [line for cell in solution.cells for line in cell.source.splitlines()[:1]
             if line in KNOWN]
    assert cells and raised == known, "\n\n".join(f"cell {n}: {error}" for n, _, error in errors)
