"""CONTRIBUTING.md's example is a whole exercise: it runs as it stands, in a copy of the library."""

import re
import shutil
import subprocess
import sys

from conftest import ROOT

FILES = "lib/ranklab/norm.py", "lib/ranklab/checks/norm.py", "lib/ranklab/interview/norm.yaml"
RUN = """
from pathlib import Path
from ranklab.checks.norm import EXERCISES
from ranklab.checks.prover import tables
from ranklab.checks.prover.proof import LIKE
from ranklab.checks.prover.slips import compiled
from ranklab.course.check import judge
from ranklab.interview import bank

exercise, = EXERCISES
print("alike:", tables.build(exercise))
verdict = judge(exercise, compiled(exercise.answer, Path("lib/ranklab/norm.py").read_text()))
print("right:", verdict.state, verdict.mistake or "")
for slip in exercise.mistakes:
    verdict = judge(exercise, *slip.functions(exercise.answer))
    is_named = slip.says == verdict.mistake.hint.removeprefix(LIKE)
    print("wrong:", verdict.state, "and named" if is_named else verdict)
print("question:", [q.id for q in bank.load() if q.id == "norm-bytes"])
"""


def test_the_example_is_a_whole_exercise(tmp_path):
    text = (ROOT / "CONTRIBUTING.md").read_text()
    blocks = re.findall(r"^```(?:python|yaml)\n(.*?)^```$", text, re.M | re.S)
    assert len(blocks) == len(FILES)
    assert [re.search(rf"`{name}`", text) for name in FILES if f"`{name}`" not in text] == []
    shutil.copytree(ROOT / "lib", tmp_path / "lib",
                    ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name, block in zip(FILES, blocks):
        (tmp_path / name).write_text(block)
    ran = subprocess.run([sys.executable, "-c", RUN], cwd=tmp_path, text=True, timeout=110,
                         capture_output=True, env={"PYTHONPATH": str(tmp_path / "lib")})
    assert ran.stdout.splitlines() == [
        "alike: []", "right: passed ", *["wrong: failed and named"] * 7,
        "question: ['norm-bytes']"], ran
