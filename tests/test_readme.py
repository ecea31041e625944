"""README.md says what is true: its commands run, its links lead somewhere."""

import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT
from test_contributing import FILES as EXAMPLE

from ranklab import cli

README = (ROOT / "README.md").read_text()
TEXTS = ("README.md", "YOUR_PROJECT.md", "TEACHING.md", "CONTRIBUTING.md", "docs/status.md")
# Commands that another test covers, or that no test can run, each with the reason.
NOT_RUN_HERE = {
    "make lab": "test_setup.py starts it, fetches the printed address and stops it",
    "make work": "make lab begins with it",
    "make doctor": "ranklab doctor, below, is the same",
    "make test": "it is what runs this test",
    "make slides": "test_slides.py builds a deck",
    "make gpu": "test_gpu_report.py runs its parts",
    "make slurm": ".ci/run calls it; here stand-ins play Slurm",
    "make site": "test_site.py builds it",
    "ranklab compare --plot build/compare.svg": "test_compare.py runs it with fewer layouts",
    "python -m ranklab.projects.baseline --size 774m --device cuda --compile --recompute "
    "--micro-batch 4": "needs a GPU; test_baseline.py holds this size against the formula",
    "python -m ranklab.projects.zero --ranks 1 --size 1.3b --stage 2 --offload cpu "
    "--micro-batch 2": "needs a GPU; the line above it is the same, small",
    "conda env create -f environment.yml": "test_pins.py: pip's part of it; conda may not be here",
    "ssh -L 8888:127.0.0.1:8888 you@there": "needs another machine",
    "ranklab work --merge 02": "test_work.py: it needs a copy and a newer lab beside it",
    "ranklab hint NAME": "test_progress.py asks for an exercise's; NAME is none",
    "source .venv/bin/activate": "the commands below it run with the same PATH",
}
# Another test or another line does about the same: make sweep runs them.
LEFT_TO_SWEEP = {
    "ranklab diagnose ranklab.projects.data_parallel", "ranklab rehearse ranklab.projects.ranks",
    "ranklab grade solutions/00_ranks.ipynb --csv build/grades.csv",
    "python -m ranklab.projects.ranks --ranks 4",
    "srun --nodes=4 --ntasks-per-node=8 --gpus-per-node=8 python -m ranklab.projects.ranks",
}
PROGRAMS = ("make", "ranklab", "python", "torchrun", "srun", "sbatch", "conda", "ssh", "source")
# Slurm's part played by the shell: sbatch runs the script, srun drops its options, runs one task.
# And 2 ranks in place of 8, each of which imports torch.
STAND_INS = {
    "sbatch": '#!/bin/sh\nexec bash "$@"\n',
    "srun": '#!/bin/sh\nwhile case "$1" in -*) true;; *) false;; esac; do\n'
            '  case "$1" in --limit|--kill-on-bad-exit|-*=*) ;; -?) shift;; esac; shift\ndone\n'
            'exec "$@"\n',
    "torchrun": '#!/bin/sh\nshift 2\n'
                'exec python -m torch.distributed.run --nproc-per-node 2 "$@"\n',
}


def commands():
    """Every command of README.md, from its blocks and from its running text, in order, once."""
    blocks = re.findall(r"^```sh\n(.*?)^```", README, re.M | re.S)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    prose = re.sub(r"^```.*?^```|<!--.*?-->", "", README, flags=re.M | re.S)
    inline = [code.split() for code in re.findall(r"`([^`]+)`", prose)]
    lines += [" ".join(words) for words in inline if len(words) > 1 and words[0] in PROGRAMS]
    return [line for line in dict.fromkeys(lines) if line]


@pytest.fixture(scope="module")
def shell(checkout, tmp_path_factory):
    """Runs a command line in a fresh clone with its .venv active, and Slurm's stand-ins."""
    tools = tmp_path_factory.mktemp("tools")
    for name, script in STAND_INS.items():
        (tools / name).write_text(script)
        (tools / name).chmod(0o755)
    path = os.pathsep.join([str(tools), str(checkout / ".venv" / "bin"), os.environ["PATH"]])
    environ = {**os.environ, "PATH": path, "RANKLAB_HOME": str(tools / "home")}

    def run(line):
        return subprocess.run(["bash", "-c", line], cwd=checkout, env=environ, text=True,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, timeout=280)

    return run


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("line", [
    pytest.param(line, marks=[pytest.mark.sweep] * (line in LEFT_TO_SWEEP))
    for line in commands() if line not in NOT_RUN_HERE])
def test_command_runs(line, shell):
    done = shell(line)
    assert done.returncode == 0, done.stdout
    assert done.stdout.strip() and "Traceback" not in done.stdout, done.stdout


def test_every_reason_is_still_needed():
    assert NOT_RUN_HERE.keys() | LEFT_TO_SWEEP <= set(commands())


@pytest.mark.parametrize("name", TEXTS)
def test_links_lead_somewhere(name):
    text = (ROOT / name).read_text()
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        assert target.startswith("https://") or (ROOT / target).exists(), f"{name}: {target}"
    # Paths in backquotes too, where they name a file of this repository.
    for path in re.findall(r"`((?:labs|lib|slides|tests|scripts|solutions)/[\w./-]+)`", text):
        is_pattern = "NN_" in path or "idea" in path or path in EXAMPLE
        assert is_pattern or (ROOT / path).exists(), f"{name}: {path}"


@pytest.mark.parametrize("name", TEXTS)
def test_ranklab_and_make_commands_exist(name, capsys):
    text = (ROOT / name).read_text()
    rules = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"`make ([a-z]+)", text)) <= rules
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    known = set(capsys.readouterr().out.split())
    assert set(re.findall(r"(?:^|`)ranklab ([a-z]+)", text, re.M)) <= known


def test_the_verdict_is_what_check_says_of_the_code_above_it(tmp_path):
    code = re.search(r"^```python\n(.*?)^```", README, re.M | re.S)[1]
    lines = ["import torch", "import torch.distributed as dist", "from ranklab import check",
             "from ranklab.collectives import sendrecv", code]
    (tmp_path / "cell.py").write_text("\n".join(lines))
    done = subprocess.run([sys.executable, tmp_path / "cell.py"], text=True, timeout=100,
                          env=os.environ | {"RANKLAB_HOME": str(tmp_path)}, stdout=subprocess.PIPE)
    assert f"```\n{done.stdout}```" in README


def test_picture_is_drawn_by_the_code():
    pictures = re.findall(r"!\[[^\]]+\]\((\S+)\)", README)
    assert pictures
    code = (ROOT / "slides" / "figures" / "readme.py").read_text()
    for picture in pictures:
        name = picture.removeprefix("slides/figures/readme_").removesuffix(".svg")
        assert f"def {name}():" in code, f"slides/figures/readme.py draws no {name}"
