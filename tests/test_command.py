"""The projects' command line: a dataclass as options, and what is refused."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from ranklab.basics.options import check_options, comma_list, option
from ranklab.projects import command
from ranklab.projects.runner import Drawn, OnRanks, Project, Resumed, Shown

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Config:
    epochs: int = option(3, "how often", least=1)
    lr: float = option(0.1, "how fast")
    norm: str = option("batch", choices=("batch", "group"))
    flip: bool = option(True, "mirror images")
    without: tuple[str, ...] = option((), "what is left out")
    betas: tuple[float, float] = (0.9, 0.95)  # no option
    checkpoint: str | None = option(None, "a folder")

    def __post_init__(self):
        check_options(self)


@dataclass(frozen=True)
class MyOptions(Resumed, OnRanks, Drawn):
    size: str = option("small", "which", ("small", "large"))
    places: tuple = option((1, 2), "where", kind=comma_list(int), flag="sizes")

    def settings(self):
        return Config(epochs={"small": 3, "large": 7}[self.size])


def project(act=None):
    return Project("ranklab.projects.some", "What it does.", MyOptions, act)


def read(*given):
    return project().parse(given)


def test_fields_are_options_and_what_is_not_given_stays():
    options, config = read(*"--size large --lr 1 --no-flip --without a,b --sizes 5".split())
    assert config == Config(epochs=7, lr=1.0, flip=False, without=("a", "b"))
    assert options == MyOptions(size="large", places=[5]) and not options.resume
    with pytest.raises(SystemExit):
        read("--betas", "1,2")


def test_it_runs_prints_draws_and_returns_the_exit_code(tmp_path, capsys):
    def act(options, settings):
        return Shown(f"{options.size}: {settings.epochs}", lambda: Figure(), code=3)

    path = tmp_path / "found.svg"
    assert project(act).main(["--figure", str(path)]) == 3
    assert capsys.readouterr().out == "small: 3\n" and "<svg" in path.read_text()
    assert project(lambda options, _: options.size).main([]) == 0


@pytest.mark.parametrize("given, sentence", [
    ("--epochs 0", "epochs=0 must be at least 1"),
    ("--epochs x", "a whole number is wanted, not 'x'"),
    ("--norm layer", "invalid choice: 'layer'"),
    ("--resume", "name it with --checkpoint"),
    ("--sizes 1,x", "invalid list of int value"),
])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_wrong_value_is_a_sentence_of_rank_0(given, sentence, rank, monkeypatch, capsys):
    said_by_then = []  # rank 1 waits first: under torchrun rank 0 has ended the job by then
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setattr(command.time, "sleep", said_by_then.append)
    with pytest.raises(SystemExit) as ended:
        read(*given.split())
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err
    assert said_by_then == [command.PATIENCE] * rank


@pytest.mark.parametrize("changes, sentence", [
    ({"norm": "layer"}, "norm='layer' must be one of batch, group"),
    ({"epochs": -1}, "epochs=-1 must be at least 1"),
])
def test_a_dataclass_refuses_by_itself(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        Config(**changes)


def with_frame_in(file):
    """A function that raises a ValueError, as if it stood in this file."""
    names = {}
    source = "def fail():\n    raise ValueError('tp=3 must\\n  divide 8')"
    exec(compile(source, file, "exec"), names)
    return names["fail"]


def run_with(error):
    with command.refusals("ranklab.projects.some"):
        raise error


def test_what_the_library_refuses_is_one_sentence(capsys):
    with pytest.raises(SystemExit, match="2"), command.refusals("ranklab.projects.some"):
        with_frame_in(command.PACKAGE + "/hybrid/layout.py")()
    assert capsys.readouterr().err == "python -m ranklab.projects.some: tp=3 must divide 8\n"
    with pytest.raises(SystemExit, match="2"), command.refusals("ranklab build"):
        open("/nonexistent/file")
    said = capsys.readouterr().err
    assert said == "ranklab build: /nonexistent/file: No such file or directory\n"


def test_a_rank_that_raised_is_the_engines_report(capsys):
    with pytest.raises(SystemExit, match="1"):
        run_with(command.RankError("rank 1 of 2 raised KeyError: 'x'\n\n  line 3", 1))
    assert capsys.readouterr().err.endswith("some: rank 1 of 2 raised KeyError: 'x'\n\n  line 3\n")


@pytest.mark.parametrize("fail", [with_frame_in("/elsewhere/torch/optim.py"), {}.popitem])
def test_a_fault_of_the_program_keeps_its_traceback(fail):
    with pytest.raises((ValueError, KeyError)), command.refusals("ranklab.projects.some"):
        fail()


@pytest.mark.parametrize("module, package", [("matplotlib", "matplotlib"), ("PIL", "pillow"),
                                             ("sklearn.datasets", "scikit-learn")])
def test_a_package_of_the_extra_course_is_one_sentence(module, package, capsys):
    with pytest.raises(SystemExit) as end, command.refusals("ranklab compare"):
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)
    assert end.value.code == 2
    assert capsys.readouterr().err == (
        f"ranklab compare: {package} is not installed: in a clone of ranklab, "
        "python -m pip install '.[course]' -c constraints.txt\n")


def test_another_module_that_is_missing_is_a_fault():
    with pytest.raises(ModuleNotFoundError), command.refusals("ranklab compare"):
        raise ModuleNotFoundError("No module named 'ranklab.planer'", name="ranklab.planer")


def test_the_extra_course_is_what_the_sentence_knows():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    course = project["optional-dependencies"]["course"]
    names = {re.match(r"[\w-]+", text)[0] for text in course}
    plugins = {"pytest-xdist", "pytest-timeout", "jsonschema"}  # jupyterlab brings the last
    assert names - plugins == set(command.BROUGHT_BY.values()) - {"nbformat"}  # jupytext brings it
