"""Lab 14's scripts for torchft and NVIDIA's ft_launcher, where the extra `resilience` is there."""

import importlib.util
import re
import subprocess
import sys

import pytest
from conftest import ROOT

from ranklab.peers import hugging_face

pytestmark = pytest.mark.timeout(150)
TORCHFT = (r"group (\d): steps (\d+) to (\d+), (\d+) of them alone, the longest ([\d.]+) s; "
           r"sum of weights (\S+)")


def needs(package):
    there = importlib.util.find_spec(package.replace("-", "_"))
    return pytest.mark.skipif(not there, reason=f"needs {package}: the extra `resilience`")


def said(script):
    done = subprocess.run([sys.executable, ROOT / "labs/jobs" / script], capture_output=True,
                          text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs("torchft")
def test_a_group_goes_on_alone_and_the_dead_one_heals_from_it():
    groups = re.findall(TORCHFT, said("torchft_step.py"))
    (_, first, last, alone, _, total), (_, began, end, *_, other) = sorted(groups)
    assert first == "1" and 10 < int(began) < int(end) and end == last
    assert 0 < int(alone) < int(began) and total == other


@needs("nvidia-resiliency-ext")
def test_ft_launcher_names_the_stopped_rank_and_starts_all_again():
    named, restarts, losses = [line for line in said("ft_step.py").splitlines() if line[0] in "rl"]
    rank, waited, after = re.findall(r"[\d.]+", named)
    assert rank == "1" and float(waited) >= 3 and abs(float(after) - float(waited)) < 2
    assert restarts == "restarts 1, began at step 4"
    found, usual = re.findall(r"[\d.]+", losses)
    assert found == usual


@pytest.mark.parametrize("after, size, lost, twice", [(4, 3, 0, 0), (3, 4, 0, 0), (3, 3, 0, 9),
                                                      (6, 3, 18, 0)])
def test_accelerate_skips_batches_of_each_process(after, size, lost, twice):
    """So the place is another one where the ranks change, and a rank's batch does not."""
    samples = hugging_face.samples_of_resumed_ranks(72, 4, after, 3, (3, size))
    if not hugging_face.are_here():
        pytest.skip(hugging_face.NOT_HERE)
    assert (72 - len({*samples}), len(samples) - len({*samples})) == (lost, twice)
