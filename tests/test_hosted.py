"""What editors and other people's machines read: they run make's own targets, as a person does."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys

import nbclient
import nbformat
import pytest
import yaml
from conftest import ROOT, load_script, repository_files
from jupyter_server.serverapp import ServerApp
from traitlets.config import PyFileConfigLoader

from ranklab.course import labs

sentences = load_script("sentences")
MAKEFILE = (ROOT / "Makefile").read_text()
FIRST = f"/lab/tree/work/{labs.TOUR}.ipynb"  # what JupyterLab opens the first time


def read(name):
    return json.loads((ROOT / name).read_text())


def target(command):
    """The one target that `command` makes; the Makefile has it."""
    program, name = command.split()
    assert program == "make" and re.search(rf"^{name}:", MAKEFILE, re.M), command
    return name


def test_a_container_brings_the_copies_and_an_environment():
    """Before an editor opens: it does not wait for a postCreateCommand."""
    container = read(".devcontainer/devcontainer.json")
    assert target(container["updateContentCommand"]) == "work" and "waitFor" not in container
    assert re.search("^work: setup", MAKEFILE, re.M) and re.search("^lab: work", MAKEFILE, re.M)
    image, _, python = container["image"].partition(":")
    assert image == "python" and python.startswith("%d.%d-" % sentences.OLDEST)
    port = re.search(r"^PORT +\?= (\d+)", MAKEFILE, re.M)[1]
    assert container["forwardPorts"] == [int(port)]
    recommended = read(".vscode/extensions.json")["recommendations"]
    assert container["customizations"]["vscode"]["extensions"] == recommended


def test_an_editor_finds_makes_environment_and_starts_kernels_beside_their_notebook():
    settings = read(".vscode/settings.json")
    venv = re.search(r"^VENV +\?= (\S+)", MAKEFILE, re.M)[1]
    here = "${workspaceFolder}"
    assert settings == {"python.defaultInterpreterPath": f"{here}/{venv}/bin/python",
                        "python.testing.pytestEnabled": True,
                        "jupyter.notebookFileRoot": "${fileDirname}"}


def test_jupyter_runs_cells_at_a_codespaces_own_address_and_at_no_other(monkeypatch):
    monkeypatch.setenv("CODESPACE_NAME", "a-space-1x")
    monkeypatch.setenv("GITHUB_CODESPACES_PORT_FORWARDING_DOMAIN", "app.github.dev")
    server = ServerApp()
    path = ROOT / "scripts" / "jupyter" / "jupyter_server_config.py"
    server.update_config(PyFileConfigLoader(str(path)).load_config())
    allowed = [re.match(server.allow_origin_pat, f"https://{name}") is not None for name in (
        "a-space-1x-8888.app.github.dev", "a-space-1x-8889.app.github.dev", "b-8.app.github.dev",
        "a-space-1x-8888.app.github.dev.b.org", "a-space-1x-8888.appxgithub.dev")]
    assert allowed == [True, True, False, False, False]


def test_the_workflow_is_the_two_commands_on_every_python():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())
    job = workflow["jobs"]["test"]
    assert job["timeout-minutes"] <= 90
    minors = range(sentences.OLDEST[1], sentences.NEWEST[1] + 1)
    assert job["strategy"]["matrix"] == {"python": [f"3.{minor}" for minor in minors]}
    assert [target(step["run"]) for step in job["steps"] if "run" in step] == ["setup", "test"]
    used = [step["uses"].partition("@")[0] for step in job["steps"] if "uses" in step]
    assert used == ["actions/checkout", "actions/setup-python"]
    assert job["steps"][1]["with"] == {"python-version": "${{ matrix.python }}"}


@pytest.mark.parametrize("name", ["README.md", "docs/setup.md"])
def test_readme_names_the_pythons(name):
    assert "any Python from %d.%d to %d.%d" % (sentences.OLDEST + sentences.NEWEST) \
        in (ROOT / name).read_text()


def test_condas_first_lines_open_the_copies_as_make_lab_does():
    text = (ROOT / "environment.yml").read_text()
    environment = re.search(r"^name: (\S+)", text, re.M)[1]
    assert f"&& conda activate {environment}\n" in text
    assert f"\n#   ranklab work && jupyter lab --LabApp.default_url={FIRST}\n" in text


def test_make_lab_opens_the_tour_where_there_are_no_copies_yet(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    for first in (True, False):
        done = subprocess.run(["make", "-n", "lab"], cwd=tmp_path, capture_output=True, text=True)
        assert ("scripts/lab.py --first " in done.stdout) is first, done
        (tmp_path / "work").mkdir(exist_ok=True)


# --- the cell for Colab -----------------------------------------------------------------------

def colab_cell():
    text = (ROOT / "docs" / "setup.md").read_text()
    section = text.partition("\n## Colab\n")[2].partition("\n## ")[0]
    return re.search(r"^```ipython\n(import os, sys\n.*?)^```", section, re.M | re.S)[1]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_colabs_cell_brings_ranklab_and_lab_00_runs(tmp_path, checkout, monkeypatch):
    """In a plain kernel in an empty folder, with the parts of git, pip and uv played."""
    cell = colab_cell().replace("PUT THE ADDRESS OF THIS REPOSITORY HERE", str(tmp_path / "origin"))
    assert str(tmp_path) in cell
    for tool in ("pip", "uv"):
        (tmp_path / tool).write_text(f'#!/bin/sh\necho "{tool} $@" >> {tmp_path}/asked\n')
        (tmp_path / tool).chmod(0o755)
    (tmp_path / "git").write_text(
        f'#!/bin/sh\n[ "$1 $2 $3" = "clone -q {tmp_path}/origin" ] && ln -s {checkout} "$4"\n')
    (tmp_path / "git").chmod(0o755)
    (tmp_path / "empty").mkdir()
    for name in ("HOME", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.delenv("RANKLAB_HOME", raising=False)
    notebook = nbformat.read(checkout / "labs" / "00_ranks.ipynb", as_version=4)
    where = "import ranklab\nprint(repr([ranklab.__file__, os.getcwd()]))"
    notebook.cells[:0] = [nbformat.v4.new_code_cell(text) for text in (cell, where)]
    nbclient.NotebookClient(notebook, timeout=100, resources={
        "metadata": {"path": str(tmp_path / "empty")}}).execute()
    imported, cwd = ast.literal_eval(notebook.cells[1].outputs[0].text)
    assert imported == str(tmp_path / "empty" / "ranklab" / "lib" / "ranklab" / "__init__.py")
    assert cwd == str(checkout / "labs")
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked == ["pip install -q uv", f"uv pip install -q --python {sys.executable} "
                     "--torch-backend=auto -e ranklab[course]"]


def test_colabs_cell_ends_where_nothing_was_installed(tmp_path):
    (tmp_path / "uv").write_text("#!/bin/sh\necho no such index >&2\nexit 2\n")
    (tmp_path / "uv").chmod(0o755)
    for tool in ("pip", "git"):
        (tmp_path / tool).symlink_to("/bin/true")
    (tmp_path / "cell.ipy").write_text(colab_cell())
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-m", "IPython", "--no-banner", "cell.ipy"],
                          cwd=tmp_path, env=environ, capture_output=True, text=True,
                          stdin=subprocess.DEVNULL, timeout=100)
    assert "no such index" in done.stdout + done.stderr
    assert done.returncode and "ranklab was not installed: the lines above say why" in done.stdout


def test_no_rule_of_git_hides_them():
    assert {".vscode/settings.json", ".vscode/extensions.json", ".devcontainer/devcontainer.json",
            ".github/workflows/test.yml"} <= set(repository_files())
