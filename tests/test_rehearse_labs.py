"""Every cell's claim to run on GPUs, and every unsolved lab's to run: both by one run of labs/.

The cells run under a GPU's rules, on the CPU. The worked answers, which are not in labs/, are
judged under the same rules in test_answers.py. `make sweep` runs all, and CI those that
changed.
"""

import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT

from ranklab.course import labs
from ranklab.engine.forkserver import ENVIRON
from ranklab.peers import hugging_face

# Cells that can't be rehearsed, by how they begin. One that can is a failure, too.
# DeepSpeed has a list of the devices that it knows; a dry run's tensors are fakes already
KNOWN = {"def their_losses(stage):", "def train_by_deepspeed():",
         "lines = launch(lambda: [*side_by_side()], ranks=4)[0]",
         "from ranklab.peers.deepspeed_pipeline import train_with_deepspeed",
         'print(project.dry_run_report("10b"))', "print(project.counted())"}
if hugging_face.are_here():
    # transformers' Trainer takes its device from accelerate, which knows no device "gpu": it moves
    # the model to the CPU
    KNOWN |= {"from ranklab.peers import hugging_face",
              "trainer_losses = hugging_face.losses_on_ranks(hugging_face.train_with_trainer, 4)"}

# Rules hold from the first step on; the solved labs take all steps.
SHORTER = {
    "01_baseline": {"def train(steps=100)": "def train(steps=30)",
                    "steps=700, eval_every=100": "steps=40, eval_every=20",
                    '"steps": 20,': '"steps": 2,',
                    'assert results["held_out"] < results["bigram"] - 0.3': ""},
    "02_collectives": {"sizes = (2**10, 2**16, 2**20, 2**24)": "sizes = (2**10, 2**16, 2**20)"},
    "03_data_parallel": {"project.scale(**functions)":
                         "project.scale(project.Config(epochs=1), seeds=(0,), **functions)",
                         "epochs=2), seeds": "epochs=1), seeds",
                         "assert project.ranges_overlap(results)": "",
                         "Config(batch=16, ": "Config(epochs=1, batch=16, ",
                         "Config(base_batch=64)": "Config(epochs=1, base_batch=64)",
                         "project.Config(warmup=0)}": "project.Config(epochs=1, warmup=0)}",
                         'names = "broadcast", "average", "mean", "shard", "buffers"':
                         'names = "mean", "buffers"',
                         "Config(without=(name,))": "Config(without=(name,), epochs=1)"},
    "04_ddp": {"(10, 50, 250)": "(2, 4, 6)",
               "ranks=4, steps=3, efficiency": "ranks=2, steps=2, efficiency",
               "compare_hooks(hooks)": "compare_hooks(hooks, steps=4)",
               'change = {"ranks": 3}': 'change = {"ranks": 3, "steps": 4}',
               '"epochs": 4,': '"epochs": 1,'},
    "05_horovod": {"project.run(ranks=4, nodes=4,":
                   "project.run(project.Config(steps=3), ranks=2, nodes=2,"},
    "06_zero": {"ranks=2, steps=40)": "ranks=2, steps=3)",
                "ranks=2, steps=12,": "ranks=2, steps=3,"},
    "07_fsdp": {"save=folder.name, **functions":
                "save=folder.name, pretrain=5, steps=5, **functions"},
    "08_tensor_parallel": {'"steps": 10': '"steps": 2', "in range(5)": "in range(1)"},
    "09_pipeline_parallel": {"steps=20,": "steps=2,", '"steps": 4,': '"steps": 2,',
                             "for lr in (0.03, 0.1)": "for lr in (0.1,)",
                             '{"flush": "a flush after each, no staleness",': "{",
                             'in ("1f1b", "interleaved", "zb-v")': 'in ("interleaved",)'},
    "10_context_parallel": {"outcome = project.run(**functions)":
                            "outcome = project.run(steps=2, ranks=4, **functions)",
                            '"steps": 2, "compare"': '"ranks": 2, "steps": 1, "compare"',
                            "for R in (2, 4, 8):": "for R in (2,):"},
    "11_expert_parallel": {"outcome = project.run(**functions)":
                           "outcome = project.run(steps=10, **functions)",
                           'balance="none", compare': 'steps=10, balance="none", compare',
                           '"steps": 10, "compare"': '"steps": 1, "compare"'},
    # Four ranks do where eight are not needed to meet all rules.
    "12_hybrid": {"steps=12,": "steps=2,", "until=6)": "until=1)",
                  "for _ in range(3)]": "for _ in range(1)]",
                  '("4x1x1", "4x1x1,zero", "4x1x1,full", "1x4x1", ': "(",
                  '"1x2x2,sp")': '"1x2x2,sp",)',
                  '("2x2x2", "2x2x2,sp,zero,recompute")': '("2x2x1,sp,zero,recompute",)',
                  "*map(parse_layout, ways), ranks=8": "*map(parse_layout, ways), ranks=4",
                  '("2x2x2", "2x2x2,zero")': '("2x1x2,zero",)',
                  "norms, *ways, ranks=8": "norms, *ways, ranks=4",
                  'words = "2x2x2,sp,zero"': 'words = "1x2x2,sp"',
                  "counted, words, ranks=8": "counted, words, ranks=4",
                  'run(layout=parse_layout("2x2x2,zero")': 'run(layout=parse_layout("2x1x2,zero")',
                  "new_trainer(Layout(2, 2, 2), order)": "new_trainer(Layout(2, 2, 1), order)",
                  "launch(tried, ranks=8)": "launch(tried, ranks=4)",
                  'parse_layout("2x2x2,zero"), folder.name, ranks=8)':
                  'parse_layout("2x1x2,zero"), folder.name, ranks=4)',
                  '("1x4x1,sp", "4x1x1,full", "1x1x1")': '("4x1x1,full", "1x1x1")'},
}


@pytest.mark.timeout(900)
@pytest.mark.sweep
@pytest.mark.parametrize("stem", labs.written())
def test_an_unsolved_lab_runs_as_on_gpus(stem, tmp_path):
    cells = rehearsed(stem, tmp_path)
    raised = [(source, error) for source, error in cells if error]
    begins = [source.splitlines()[0] for source, _ in raised]
    known = [line for source, _ in cells for line in source.splitlines()[:1] if line in KNOWN]
    assert cells and begins == known, "\n\n".join(error for _, error in raised)


def rehearsed(stem, folder):
    """Every code cell of the unsolved lab: [its source, what it raised or ""]."""
    environ = ENVIRON | {"RANKLAB_REHEARSE": "gpu", "MPLBACKEND": "agg"}
    report = folder / "cells.json"
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "rehearse_cells.py", ROOT / "labs" / f"{stem}.ipynb",
         report], env={**os.environ, **environ, "RANKLAB_HOME": str(folder)},
        input=json.dumps(SHORTER.get(stem, {})), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(report.read_text())
