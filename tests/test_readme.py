"""README.md and docs/ say what is true: their commands run, their links lead somewhere."""

import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT
from test_contributing import FILES as EXAMPLE

from ranklab import cli

README = (ROOT / "README.md").read_text()
DOCS = sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))
TEXTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "AGENTS.md", *DOCS)
# Their commands run here; test_your_project.py runs those of docs/your_project.md, in its files.
RUN = [name for name in ("README.md", *DOCS) if name != "docs/your_project.md"]
# Commands that another test covers, or that no test can run, each with the reason.
NOT_RUN_HERE = {
    "make tour": "test_tour.py runs it",
    "make lab": "test_setup.py starts it, fetches the printed address and stops it",
    "make work": "make lab begins with it",
    "make doctor": "ranklab doctor, of docs/paths.md, is the same",
    "make setup": "make lab begins with it",
    "make test": "it is what runs this test",
    "make sweep": "it runs this test as well",
    "make slides": "test_slides.py builds a deck",
    "make gpu": "test_gpu_report.py runs its parts",
    "make slurm": ".ci/run calls it; here stand-ins play Slurm",
    "make site": "test_site.py builds it",
    "make site REPOSITORY=https://github.com/owner/name": "test_site.py builds it with an address",
    "make site REPOSITORY=": "test_site.py tries an empty address",
    "ranklab compare --plot build/compare.svg": "test_compare.py runs it with fewer layouts",
    "make pythons": "needs root, debootstrap and an hour",
    "python -m ranklab.projects.baseline --size 774m --device cuda --compile --recompute "
    "--micro-batch 4": "needs a GPU; test_baseline.py holds this size against the formula",
    "python -m ranklab.projects.zero --ranks 1 --size 1.3b --stage 2 --offload cpu "
    "--micro-batch 2": "needs a GPU; the line above it is the same, small",
    "conda env create -f environment.yml": "test_pins.py: pip's part of it; conda may not be here",
    "ssh -L 8888:127.0.0.1:8888 you@there": "needs another machine",
    "ranklab work --merge 02": "test_work.py: it needs a copy and a newer lab beside it",
    "ranklab hint NAME": "test_progress.py asks for an exercise's; NAME is none",
    "ranklab work ~/labs": "test_work.py: in a folder of its own",
    "ranklab grade submissions --csv grades.csv --html report.html":
        "test_class.py grades a class, with both files",
    "python tests/class_of_30.py class": "test_class.py writes that class",
    "docker build -t ranklab .": "needs docker's daemon; the workflow builds it",
    'docker run --rm --network none -v "$PWD/submissions:/in:ro" -v "$PWD/grades:/out" ranklab '
    "ranklab grade /in --csv /out/grades.csv --html /out/report.html": "needs docker's daemon",
    ".venv/bin/python -m pip freeze --all --exclude pip --exclude ranklab":
        "the fresh clone's .venv has no pip; test_pins.py compares the versions",
    "uv pip compile --universal --python-version 3.11.0 --all-extras -c constraints.txt "
    "pyproject.toml": "asks an index; docs/status.md says when it passed",
    "MACOSX_DEPLOYMENT_TARGET=14.0 uv pip compile --python-version 3.14.0 --python-platform "
    "aarch64-apple-darwin --only-binary :all: --no-binary deepspeed --extra course --extra mpi "
    "--extra bench --extra hf --extra cluster --extra site -c constraints.txt "
    "pyproject.toml": "the same",
    "source .venv/bin/activate": "the commands below it run with the same PATH",
}
# Another test or another line does about the same: make sweep runs them.
LEFT_TO_SWEEP = {
    "ranklab diagnose ranklab.projects.data_parallel", "ranklab rehearse ranklab.projects.ranks",
    "ranklab grade solutions/00_ranks.ipynb --csv build/grades.csv",
    "python -m ranklab.projects.ranks", "python -m ranklab.projects.ranks --ranks 4",
    "ranklab drill --lab 02", "ranklab interview --minutes 15", "ranklab interview --minutes 30",
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
    """Every command of these texts, from blocks and from running text, in order, once."""
    lines = []
    for text in ((ROOT / name).read_text() for name in RUN):
        blocks = re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S)
        lines += [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
        prose = re.sub(r"^```.*?^```|<!--.*?-->", "", text, flags=re.M | re.S)
        inline = [code.split() for code in re.findall(r"`([^`]+)`", prose)]
        # `ranklab plan` alone is a name, which test_ranklab_and_make_commands_exist looks up.
        inline = [words for words in inline if len(words) > 1 + (words[0] == "ranklab")]
        lines += [" ".join(words) for words in inline if words[0] in PROGRAMS]
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


def anchors(text):
    """The addresses that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", TEXTS)
def test_links_lead_somewhere(name):
    text = (ROOT / name).read_text()
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        exists = target.startswith("https://") or (ROOT / name).parent.joinpath(target).exists()
        assert exists, f"{name}: {target}"
    for target, anchor in re.findall(r"\]\(([^)#\s:]*)#([^)]+)\)", text):
        page = (ROOT / name).parent.joinpath(target) if target else ROOT / name
        assert anchor in anchors(page.read_text()), f"{name}: {target}#{anchor}"
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
    verdict = re.search(r"^```\n(ring_all_reduce\n.*?)^```", README, re.M | re.S)[1]
    for part in verdict.split("  ...\n"):
        assert part and part in done.stdout, done.stdout


def test_picture_is_drawn_by_the_code():
    pictures = re.findall(r"!\[[^\]]+\]\((\S+)\)", README)
    assert pictures
    code = (ROOT / "slides" / "figures" / "readme.py").read_text()
    for picture in pictures:
        name = picture.removeprefix("slides/figures/readme_").removesuffix(".svg")
        assert f"def {name}():" in code, f"slides/figures/readme.py draws no {name}"
