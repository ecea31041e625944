"""constraints.txt: pins everything, names no place, and is what pip and conda users get."""

import importlib.metadata
import re
import subprocess
import sys
import sysconfig

import yaml
from conftest import ROOT, load_script
from packaging.requirements import Requirement

setup = load_script("setup")


def pins():
    """{package: version} of constraints.txt, names in pip's normal form."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {normal(name): version for name, version in found}


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_requirement_is_pinned_inside_its_range():
    for text in importlib.metadata.requires("ranklab"):
        wanted = Requirement(text)
        assert normal(wanted.name) in pins(), f"{wanted.name} is not in constraints.txt"
        assert wanted.specifier.contains(pins()[normal(wanted.name)]), text


def test_pins_are_what_is_installed():
    # Only the environment's own folders: setuptools brings copies of some packages for itself.
    places = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    found = importlib.metadata.distributions(path=list(places))
    here = {normal(one.name): one.version.partition("+")[0] for one in found}
    assert pins()["torch"] == here["torch"]
    wrong = {name: (here[name], pin) for name, pin in pins().items() if here.get(name, pin) != pin}
    assert not wrong, "installed, pinned"
    # NVIDIA's packages and triton come with torch's CUDA wheels, in the versions that it names.
    # Horovod is what `make horovod` built.
    extra = [name for name in here if name not in pins()
             and name not in ("pip", "ranklab", "horovod")
             and not name.startswith(("nvidia-", "cuda-", "triton"))]
    assert not extra, "installed by somebody, but not pinned"


def test_pins_name_no_place_and_no_platform():
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        assert line.startswith("#") or re.fullmatch(r"[\w.-]+==[\w.]+", line), line
    assert not [name for name in pins() if name.startswith("nvidia-")]


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
