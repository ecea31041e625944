"""Rules for every test: only listed skips, progress kept out of the checkout, slow files marked."""
import gc
import importlib.util
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import uuid

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent

# A regular expression that the reason of a skip must match, and when that skip is right.
ALLOWED_SKIPS = (
    r"needs \d+ (CUDA )?GPUs?",             # the machine has fewer; the same code is tested on gloo
    r"needs CUDA",                          # same
    r"needs (node|npm|marp|chromium)\b",    # slides: built where these are installed, as on CI
    r"needs (mpirun|mpi4py|an MPI library)",   # lab 02's MPI part: an extra
    r"needs ipyparallel",                   # bench: an extra
    r"needs Linux",                         # signals and /proc; macOS is best effort
    r"needs git",                           # what is in the repository, when run from an archive
    r"needs horovod: make horovod builds it",  # lab 05: takes minutes, so nothing else builds it
    r"needs (transformers|accelerate)",     # lab 05: an extra, which `make test` installs
    r"needs tensorboard",                   # lab 12: an extra, which `make test` installs
    r"needs megatron-core",                 # lab 08: an extra, which nothing else installs
    r"needs sphinx",                        # the site: an extra, which `make test` installs
    r"needs tensorflow",                    # lab 05: 1.5 GB, in an environment of its own
    r"needs root",                          # network namespaces
)
# Files that are too slow for `make check`.
SLOW_FILES = ("test_wrong_answers", "test_grade", "test_engine_scripts", "test_engine_notebook",
              "test_horovod_real", "test_horovod_project", "test_rehearse_labs",
              "test_zero_deepspeed", "test_zero_models", "test_fsdp_project",
              "test_hybrid_kills", "test_site")

# Files whose tests share nothing: any worker takes any of them, so they fill both cores at the end.
SPREAD_FILES = ("test_wrong_answers", "test_rehearse_labs")


def allowed(reason):
    """True when the reason of a skip is on the list."""
    return any(re.search(pattern, reason) for pattern in ALLOWED_SKIPS)


def refuse(report):
    """A skip that nobody allowed becomes a failure that says so."""
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if report.skipped and not hasattr(report, "wasxfail") and not allowed(reason):
        report.outcome = "failed"
        report.longrepr = f"{reason}\nThis skip is not in ALLOWED_SKIPS of tests/conftest.py."


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    refuse((yield).get_result())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """A notebook's cell fails when fewer checks pass in it than when it was built."""
    result = yield
    if hasattr(item, "test_outputs"):  # nbval's
        now, built = passes(item.test_outputs), passes(item.cell.outputs)
        assert now >= built, f"{now} checks pass, not {built}: {item.test_outputs}"
    return result


def passes(outputs):
    """How many checks say in these outputs of a cell that they passed."""
    shown = (out.get("text") or out.get("data", {}).get("text/plain", "") for out in outputs)
    return "\n".join(shown).count("\n  ->    passed")


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report(collector):
    refuse((yield).get_result())


def pytest_addoption(parser):
    parser.addoption("--sweep", action="store_true", help="also what `make test` leaves out")


def pytest_collection_modifyitems(config, items):
    for item in items:
        if item.path.stem.startswith(SLOW_FILES):
            item.add_marker(pytest.mark.slow)
    by_name = config.option.keyword or any("::" in argument for argument in config.args)
    if not (config.option.sweep or by_name):
        left_out = [item for item in items if item.get_closest_marker("sweep")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("sweep")]


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
    """A file's tests stay together and in order, but for SPREAD_FILES, which come last."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.partition("::")[0]
            return nodeid if pathlib.Path(file).stem in SPREAD_FILES else file

    return ByFile(config, log)


def pytest_configure(config):
    # A shell ignores Ctrl-C for what it starts in the background, and so would every test's child.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Checks record progress: in tests it goes to a folder of this run, never to the checkout.
    if "RANKLAB_HOME" not in os.environ:
        home = os.environ["RANKLAB_HOME"] = tempfile.mkdtemp(prefix="ranklab-test-")
        config.add_cleanup(lambda: shutil.rmtree(home, ignore_errors=True))
    kernels_by_files(config)


def kernels_by_files(config):
    """Jupyter kernels talk through socket files. On TCP a kernel's port is chosen some time before
    it is bound, and our ranks open so many ports that now and then it is taken by then.
    """
    from jupyter_client import KernelManager

    folder = tempfile.mkdtemp(prefix="rl-")  # a short path: the system allows 107 characters
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    init = KernelManager.__init__

    def init_with_files(self, *args, **kwargs):
        kwargs.setdefault("transport", "ipc")
        kwargs.setdefault("connection_file", f"{folder}/{uuid.uuid4().hex[:12]}.json")
        init(self, *args, **kwargs)

    KernelManager.__init__ = init_with_files
    config.add_cleanup(lambda: setattr(KernelManager, "__init__", init))


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
