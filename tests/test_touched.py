"""scripts/touched.py: which labs a changed file belongs to."""

import subprocess
import sys

import pytest
from conftest import ROOT

from ranklab.course import labs

sys.path.insert(0, str(ROOT / "scripts"))
import touched  # noqa: E402

SCHOOL = ("course", "interview", "cli.py", "pytest_plugin.py")  # make test alone answers for them


def labs_of(name):
    return " ".join(stem[:2] for stem in labs.STEMS if touched.belongs(name, stem))


def test_every_file_of_the_library_has_its_labs():
    files = [path.relative_to(touched.LIB) for path in touched.LIB.rglob("*.py")]
    homeless = [str(path) for path in files
                if path.name != "__init__.py" and path.parts[0] not in SCHOOL
                and not labs_of(f"lib/ranklab/{path}")]
    assert sorted(homeless) == ["projects/tour.py"]      # make test runs the tour


@pytest.mark.parametrize(("name", "stems"), [
    ("lib/ranklab/zero/keeping.py", "06"),
    ("lib/ranklab/checks/zero/stages.py", "06"),
    ("lib/ranklab/peers/fsdp2.py", "07"),
    ("lib/ranklab/peers/llama.py", "08 10"),
    ("lib/ranklab/models/resnet.py", "04"),
    ("lib/ranklab/planner/choose.py", "12 13"),            # lab 12 has choose_layout
    ("labs/source/03_data_parallel.py", "03"),
    ("slides/figures/02_ring.svg", "02"),
    ("tests/right_answers/ddp.py", "04"),
    ("tests/test_zero_project.py", "06"),
    ("lib/ranklab/course/drill.py", ""),
    ("README.md", ""),
])
def test_a_file_belongs_to_the_labs_that_run_it(name, stems):
    assert (ROOT / name).exists()
    assert labs_of(name) == stems


def test_what_all_labs_run_is_in_all_of_them():
    every = " ".join(stem[:2] for stem in labs.STEMS)
    for name in ("engine/launcher.py", "engine/report.py", "checks/trial.py", "basics/options.py"):
        assert labs_of(f"lib/ranklab/{name}") == every


def test_the_command_prints_the_labs_of_the_last_commits():
    done = subprocess.run([sys.executable, ROOT / "scripts" / "touched.py", "--commits", "1"],
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert all(number.isdigit() for number in done.stdout.split())
