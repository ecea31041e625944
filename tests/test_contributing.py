"""CONTRIBUTING.md's example is a whole exercise: it runs as it stands, in a copy of the library."""

import re
import shutil
import subprocess
import sys

from conftest import ROOT

FILES = ("lib/ranklab/norm.py", "lib/ranklab/checks/norm.py",
         "tests/wrong_answers/norm/global_norm.py", "lib/ranklab/interview/norm.yaml")
RUN = """
import importlib.util, re, sys
from pathlib import Path
sys.path.insert(0, "tests")
from mutants import as_in_a_notebook
from ranklab.checks.norm import EXERCISES
from ranklab.course.check import judge
from ranklab.interview import bank

path = Path("tests/wrong_answers/norm/global_norm.py")
spec = importlib.util.spec_from_file_location("wrong", path)
spec.loader.exec_module(wrong := importlib.util.module_from_spec(spec))
exercise, = EXERCISES
right = as_in_a_notebook(exercise.answer, Path("lib/ranklab/norm.py").read_text())
verdict = judge(exercise, right)
print("right:", verdict.state, verdict.mistake or "")
for mutant in wrong.WRONG:
    verdict = judge(exercise, mutant)
    named = re.search(mutant.__doc__, " ".join(str(verdict).split()))
    print("wrong:", verdict.state, "and named" if named else verdict)
print("question:", [q.id for q in bank.load() if q.id == "norm-bytes"])
"""


def test_the_example_is_a_whole_exercise(tmp_path):
    text = (ROOT / "CONTRIBUTING.md").read_text()
    blocks = re.findall(r"^```(?:python|yaml)\n(.*?)^```$", text, re.M | re.S)
    assert len(blocks) == len(FILES)
    assert [re.search(rf"`{name}`", text) for name in FILES if f"`{name}`" not in text] == []
    shutil.copytree(ROOT / "lib", tmp_path / "lib",
                    ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    (tmp_path / "tests" / "wrong_answers" / "norm").mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "mutants.py", tmp_path / "tests")
    for name, block in zip(FILES, blocks):
        (tmp_path / name).write_text(block)
    ran = subprocess.run([sys.executable, "-c", RUN], cwd=tmp_path, text=True, timeout=110,
                         capture_output=True, env={"PYTHONPATH": str(tmp_path / "lib")})
    assert ran.stdout.splitlines() == [
        "right: passed ", *["wrong: failed and named"] * 6, "question: ['norm-bytes']"], ran
