"""`ranklab diagnose` on the programs of tests/field: the bugs are named, nothing else."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from ranklab.clinic import startup
from ranklab.clinic.observer import words_of_program
from ranklab.clinic.trace import Call, Lines, read
from ranklab.clinic.watch import Watch

sys.path.insert(0, str(ROOT / "tests" / "field"))
import score  # noqa: E402

# In every run; `make sweep` has all: a quarter of an hour.
SOME = ("module_in_forward", "loss_never_divided", "circle_of_sends", "optimizer_not_restored",
        "two_losses", "spawned_ranks")
DIGEST = [1, 1.0, 1.0, 1.0, 1]


@pytest.mark.timeout(200)
@pytest.mark.parametrize("program", [
    pytest.param(program, id=program.path.stem,
                 marks=[pytest.mark.sweep] * (program.path.stem not in SOME))
    for program in score.programs()])
def test_a_program_of_the_field(program):
    report = score.diagnosed(program)
    outcome, names = score.judged(program, report)
    assert outcome in (score.RIGHT, score.QUIET), f"{outcome}: {names}\n{report}"


def test_a_sitecustomize_of_the_machine_runs_as_well(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import os\nos.environ['SEEN'] = 'yes'\n")
    paths = os.pathsep.join([str(Path(startup.__file__).parent), str(tmp_path)])
    done = subprocess.run([sys.executable, "-c", "import os; print(os.environ.get('SEEN'))"],
                          text=True, capture_output=True, check=True,
                          env=os.environ | {"PYTHONPATH": paths, "RANKLAB_DIAGNOSE": str(tmp_path)})
    assert done.stdout == "yes\n" and not done.stderr


def test_words_are_those_of_a_loop_and_of_no_other_variable():
    password = "a secret"
    seen = []
    for name in ("news", "wiki"):
        seen.append(words_of_program())
    assert seen == [{"name": "news"}, {"name": "wiki"}] and words_of_program() == {} and password


def test_the_page_has_all_names():
    page = (ROOT / "docs" / "diagnose.md").read_text()
    assert score.NAMES <= set(re.findall(r"`(\w+)`", page))


def calls_on(tmp_path, waits_on_rank_1):
    """What two ranks write that wait for each other in groups a and b, one of them or both."""
    for rank, names in enumerate(("ab", "ba")):
        lines = Lines(tmp_path, rank)
        for name in names:
            lines.write("group", name, [0, 1])
        name = names[0]
        if rank == 0 or waits_on_rank_1:
            lines.write("call", *Call(0, name, "all_reduce", "SUM", None, f"train.py:{rank}", 0, 0,
                                      False, "", DIGEST, 0.0, {}))
            lines.write("wait", f"train.py:{rank}")


def test_a_circle_is_seen_at_the_first_look_after_it_has_closed(tmp_path):
    watch = Watch(tmp_path)
    calls_on(tmp_path, waits_on_rank_1=False)
    assert [watch.look() for _ in range(3)] == [[], [], []]
    calls_on(tmp_path, waits_on_rank_1=True)
    assert [rank.number for rank in watch.look()] == [0, 1] and watch.looks == 4


def test_who_has_returned_is_waited_for_in_vain_and_launch_ends_its_own_ranks(tmp_path):
    calls_on(tmp_path, waits_on_rank_1=False)
    lines = Lines(tmp_path, 1)
    lines.write("group", "a", [0, 1])
    lines.write("fate", "returned")
    assert read(tmp_path)[1].fate == "returned" and len(Watch(tmp_path).look()) == 2
    lines.write("launched")
    assert Watch(tmp_path).look() == []


@pytest.mark.timeout(100)
def test_a_program_whose_ranks_wait_in_a_circle_is_ended(tmp_path):
    """Its own limit is half an hour, and that of `diagnose` is 80 s."""
    (tmp_path / "circle.py").write_text('''"""Two groups, taken in two orders.
expects: communicator_order
ranks: 2
"""
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
groups = [dist.new_group([0, 1]) for _ in range(2)]
for group in groups if dist.get_rank() else reversed(groups):
    dist.all_reduce(torch.ones(9), group=group)
''')
    program = score.Program(tmp_path / "circle.py", "", ("communicator_order",), "2")
    report = score.diagnosed(program)
    assert "communicator_order\n" in report and "they were ended at look" in report, report
    assert "number 1 of 2" in report and "number 2 of 2" in report


def test_a_program_that_ends_before_its_group_is_up_is_told_so(tmp_path):
    (tmp_path / "early.py").write_text("import torch.distributed as dist\nif True:\n    exit()\n"
                                       "dist.init_process_group()\n")
    report = score.diagnosed(score.Program(tmp_path / "early.py", "", (), "2"))
    assert "all its processes ended before init_process_group had returned" in report, report
