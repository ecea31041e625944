"""Which tests run and in which order, and what many of them use."""
import gc
import importlib.util
import json
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig

import pytest
import rules

from ranklab.engine.forkserver import MODULES

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Files that are too slow for `make check`, by how they begin or end.
SLOW_BEGINS = tuple(f"test_{name}" for name in (
    "answers", "hints", "grade", "engine_scripts", "engine_notebook", "engine_modules",
    "horovod_real", "rehearse", "zero_peers", "site", "clinic", "compare", "hybrid",
    "expert_parallel", "context_parallel", "pytest_plugin", "contributing", "planner_export",
    "projects_in_place", "tour"))
SLOW_ENDS = "_project"

# Files whose tests share nothing: any worker takes any of them, so they fill all cores at the end.
# The shortest tests come last.
SPREAD_FILES = ("test_cluster_slurm", "test_rehearse_labs", "test_mistakes",
                "test_answers")


def pytest_addoption(parser):
    parser.addoption("--sweep", action="store_true", help="also what `make test` leaves out")
    parser.addoption("--stems", default="", help='only tests named after these labs, "03 06"')


def pytest_collection_modifyitems(config, items):
    for item in items:
        if item.path.stem.startswith(SLOW_BEGINS) or item.path.stem.endswith(SLOW_ENDS):
            item.add_marker(pytest.mark.slow)
    by_name = config.option.keyword or any("::" in argument for argument in config.args)
    if not (config.option.sweep or by_name):
        left_out = [item for item in items if item.get_closest_marker("sweep")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("sweep")]
    if config.option.stems:
        items[:] = [item for item in items if of_labs(item, config.option.stems.split())]
    items.sort(key=turn)


def of_labs(item, stems):
    """True for a test whose file or parameter is named after one of the labs, or an exercise; with
    all labs, for every test.
    """
    from ranklab.course import labs

    chosen = [stem for stem in labs.written() if stem.startswith(tuple(stems))]
    names = {item.name for stem in chosen for item in labs.checks_of(stem).EXERCISES}
    parameter = item.name.rstrip("]").partition("[")[2]
    files = tuple(f"test_{stem.partition('_')[2]}" for stem in chosen)
    return (len(chosen) == len(labs.written()) or item.path.stem.startswith(files)
            or re.split("__|-", parameter.removesuffix(".md"))[0] in names.union(chosen))


def turn(item):
    """What takes long comes early: notebooks, slow tests, all others, then what fills the end."""
    if item.path.stem in SPREAD_FILES:
        return 3 + SPREAD_FILES.index(item.path.stem)
    return 0 if item.path.suffix == ".ipynb" else 1 if item.get_closest_marker("slow") else 2


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What the tests import stays, so the garbage collector need not look at it again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_xdist_make_scheduler(config, log):
    """A file's tests stay together, but for SPREAD_FILES."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.partition("::")[0]
            return nodeid if pathlib.Path(file).stem in SPREAD_FILES else file

    return ByFile(config, log)


def pytest_configure(config):
    if not config.pluginmanager.has_plugin("rules"):
        config.pluginmanager.register(rules, "rules")


@pytest.fixture(scope="module", autouse=True)
def imported_once(request):
    """Ranks run functions of the test's file: what forks them imports it, and pytest with it, or
    each rank would spend half of its time on that.
    """
    MODULES.add(request.module.__name__)
    yield
    MODULES.discard(request.module.__name__)


@pytest.fixture
def one_thread():
    """Two threads for tiny matrices only wait for each other when the machine is busy."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A file that is read in no time: this folder's tests."""
    path = tmp_path_factory.mktemp("text") / "tests.txt"
    here = sorted(pathlib.Path(__file__).parent.glob("*.py"))
    path.write_text("".join(each.read_text() for each in here))
    return str(path)


@pytest.fixture(scope="session")
def checkout(tmp_path_factory):
    """A copy of this checkout in a fresh folder, with a ready .venv that borrows our packages.

    So `make` and README's commands run as in a fresh clone, without installing 1.5 GB again.
    """
    root = tmp_path_factory.mktemp("clone") / "ranklab"
    for name in repository_files():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    venv = root / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    site = next((venv / "lib").glob("python3*/site-packages"))
    (site / "borrowed.pth").write_text(f"{root / 'lib'}\n{sysconfig.get_path('purelib')}\n")
    for folder in ("share", "etc"):                        # Jupyter's pages and settings
        if (pathlib.Path(sys.prefix) / folder).exists():
            (venv / folder).symlink_to(pathlib.Path(sys.prefix) / folder)
    for name, module in (("ranklab", "ranklab.cli"), ("torchrun", "torch.distributed.run")):
        script = venv / "bin" / name
        script.write_text(f"#!{venv}/bin/python\nimport sys\nfrom {module} import main\n"
                          "sys.exit(main())\n")
        script.chmod(0o755)
    setup = load_script("setup", root)
    stamp = {"root": str(setup.ROOT), "torch": "", "pins": setup.pins()}
    (venv / "ranklab-setup.json").write_text(json.dumps(stamp))
    return root


def repository_files():
    """The files of the checkout as git would commit them; skips the test where there is no git."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT,
                            capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("needs git: this is not a clone")
    return sorted({name for name in listed.stdout.splitlines() if (ROOT / name).is_file()})


def load_script(name, root=ROOT):
    """The module scripts/<name>.py of the checkout at `root`."""
    spec = importlib.util.spec_from_file_location(f"script_{name}", root / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(root / "scripts"))  # as Python does for a script
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module
