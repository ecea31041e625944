"""docs/your_project.md: each example runs, and says what stands below it."""

import os
import re
import shlex
import subprocess
import sys

import pytest
from conftest import ROOT
from engine_tools import Notebook

pytestmark = [pytest.mark.timeout(200), pytest.mark.slow]
PAGE = (ROOT / "docs/your_project.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.M | re.S)
PROGRAMS = {"pytest": "pytest", "torchrun": "torch.distributed.run", "ranklab": "ranklab.cli"}


def below(kind):
    """(block, text below it) for each block of this kind."""
    return [(code.strip(), BLOCKS[place + 1][1].splitlines())
            for place, (name, code) in enumerate(BLOCKS) if name == kind]


@pytest.fixture
def folder(tmp_path):
    """It holds the files of the page."""
    for kind, text in BLOCKS:
        if kind == "json":
            (tmp_path / "config.json").write_text(text)
        elif name := re.match(r"# (\w+\.py)\n", text):
            (tmp_path / name[1]).write_text(text)
    return tmp_path


@pytest.mark.parametrize("command, says", below("sh"), ids=lambda value: str(value)[:14])
def test_the_command_says_so(command, says, folder):
    program, *arguments = shlex.split(command)
    environ = os.environ | {"PYTEST_ADDOPTS": "-p ranklab.pytest_plugin -p no:cacheprovider"}
    done = subprocess.run([sys.executable, "-m", PROGRAMS[program], *arguments], cwd=folder,
                          env=environ, text=True, timeout=150, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT)
    assert says and not [line for line in says if line not in done.stdout], done.stdout
    if program == "pytest":
        assert "2 failed, 1 passed" in done.stdout


def test_the_cell_shows_so(folder):
    notebook = Notebook(folder)
    try:
        notebook.wait_until_ready()
        notebook.run("%load_ext ranklab\nimport torch, torch.distributed as dist")
        for cell, says in below("ipython"):
            assert notebook.run(cell).splitlines() == says
    finally:
        notebook.close()


def test_no_example_was_forgotten():
    assert [len(below(kind)) for kind in ("sh", "ipython")] == [4, 1]
