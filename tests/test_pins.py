"""constraints.txt: pins everything, fits every Python and machine that docs/setup.md
names, and is what pip and conda users get."""

import functools
import importlib.metadata
import itertools
import re
import subprocess
import sys
import sysconfig

import pytest
import yaml
from conftest import ROOT, load_script
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

setup = load_script("setup")
PYTHONS = [f"3.{minor}.0" for minor in range(setup.OLDEST[1], setup.NEWEST[1] + 1)]
MACHINES = [("linux", "Linux", "x86_64"), ("linux", "Linux", "aarch64"),
            ("darwin", "Darwin", "arm64")]
ENVIRONMENTS = [
    {"python_full_version": python, "python_version": python.rpartition(".")[0],
     "sys_platform": platform, "platform_system": system, "platform_machine": machine}
    for python, (platform, system, machine) in itertools.product(PYTHONS, MACHINES)]
# NVIDIA's packages and triton come with torch's CUDA wheels, in the versions that it names.
WITH_TORCH = ("nvidia-", "cuda-", "triton")


@functools.cache
def lines():
    """[(requirement, which Python it asks for, as its comment says)] of constraints.txt."""
    text = (ROOT / "constraints.txt").read_text().splitlines()
    split = [line.partition("#")[::2] for line in text if not line.startswith("#")]
    return [(Requirement(pin), note.strip().removeprefix("Python ")) for pin, note in split]


def pins(environment=None):
    """{package: version} of constraints.txt, names in pip's normal form; here, or elsewhere."""
    return {normal(pin.name): str(pin.specifier).removeprefix("==") for pin, _ in lines()
            if not pin.marker or pin.marker.evaluate(environment)}


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


@functools.cache
def requires(name):
    """What an installed package asks for; nothing where it is not installed."""
    try:
        return [Requirement(text) for text in importlib.metadata.requires(name) or ()]
    except importlib.metadata.PackageNotFoundError:
        return []


def needed(environment):
    """Every requirement of ranklab with all its extras in `environment`, and of what it brings."""
    extras = importlib.metadata.metadata("ranklab").get_all("Provides-Extra")
    todo, seen = [("ranklab", frozenset(extras))], set()
    while todo:
        name, extras = todo.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        for wanted in requires(name):
            if not wanted.marker or any(wanted.marker.evaluate({**environment, "extra": extra})
                                        for extra in {"", *extras}):
                yield wanted
                todo.append((normal(wanted.name), frozenset(wanted.extras)))


@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=lambda each: "-".join(each.values()))
def test_all_that_is_needed_is_pinned_inside_its_range(environment):
    pinned = pins(environment)
    for wanted in needed(environment):
        name = normal(wanted.name)
        if not name.startswith(WITH_TORCH):
            assert name in pinned, f"{name} is not in constraints.txt"
            assert wanted.specifier.contains(pinned[name]), wanted


def test_every_pin_fits_every_python():
    """Of its installed package, or else of the comment beside it: what Python it asks for."""
    everywhere = set.intersection(*({normal(wanted.name) for wanted in needed(environment)}
                                    for environment in ENVIRONMENTS))
    for pin, note in lines():
        assert note or normal(pin.name) in everywhere, (
            f"not every Python installs {pin.name}: its line must say which Python it asks")
        try:
            asks = importlib.metadata.metadata(pin.name).get("Requires-Python") or ""
        except importlib.metadata.PackageNotFoundError:
            assert note, f"{pin.name} is not installed here: its line must say which Python it asks"
            asks = note
        assert not note or note == asks, f"{pin.name} asks for Python {asks}"
        for environment in ENVIRONMENTS:
            if not pin.marker or pin.marker.evaluate(environment):
                python = environment["python_full_version"]
                assert SpecifierSet(asks).contains(python), f"{pin}: Python {asks}, not {python}"


def test_pins_are_what_is_installed():
    # Only the environment's own folders: setuptools brings copies of some packages for itself.
    places = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    found = importlib.metadata.distributions(path=list(places))
    here = {normal(one.name): one.version.partition("+")[0] for one in found}
    assert pins()["torch"] == here["torch"]
    wrong = {name: (here[name], pin) for name, pin in pins().items() if here.get(name, pin) != pin}
    assert not wrong, "installed, pinned"
    # Horovod is what `make horovod` built.
    extra = [name for name in here if name not in pins()
             and name not in ("pip", "ranklab", "horovod") and not name.startswith(WITH_TORCH)]
    assert not extra, "installed by somebody, or pinned no more (then `rm -r .venv`)"


def test_pins_name_no_place_and_no_platform_but_in_a_marker():
    marker = r'( ; (sys_platform|python_full_version) [=<>]=? "[\w.]+")?'
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        assert line.startswith("# ") or re.fullmatch(
            r"[\w.-]+==[\w.]+" + marker + "(    # Python [<>=!~.,0-9]+)?", line), line
    names = [normal(pin.name) for pin, _ in lines()]
    assert not [name for name in names if name.startswith(WITH_TORCH)]
    for environment in ENVIRONMENTS:
        assert len(pins(environment)) == sum(not pin.marker or pin.marker.evaluate(environment)
                                             for pin, _ in lines()), "two lines for one package"


def test_conda_gets_the_same_pins():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    conda = [item for item in environment["dependencies"] if isinstance(item, str)]
    pip = next(item["pip"] for item in environment["dependencies"] if isinstance(item, dict))
    assert pip == ["--constraint constraints.txt", f"--editable .[{setup.EXTRAS}]"]
    python = next(item for item in conda if item.startswith("python="))
    assert python == "python=3.%d" % setup.OLDEST[1]


def test_condas_pip_lines_are_satisfied_here(checkout):
    environment = yaml.safe_load((checkout / "environment.yml").read_text())
    lines = next(item["pip"] for item in environment["dependencies"] if isinstance(item, dict))
    (checkout / "conda-would-write.txt").write_text("\n".join(lines))
    done = subprocess.run([sys.executable, "-m", "pip", "install", "--dry-run", "--no-index",
                           "--no-build-isolation", "-r", "conda-would-write.txt"], cwd=checkout,
                          capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Would install ranklab" in done.stdout or "Would install" not in done.stdout
