"""Rules for every test: no skip that is not on this list, progress kept out of the checkout, slow tests marked."""
import os
import re
import shutil
import sys
import tempfile

import pytest

# A regular expression that the reason of a skip must match, and when that skip is right.
ALLOWED_SKIPS = (
    r"needs \d+ (CUDA )?GPUs?",             # the machine has fewer; the same code is tested on gloo
    r"needs CUDA",                          # same
    r"needs (node|npm|marp|chromium)\b",    # slides: built where these are installed, as on CI
    r"needs (mpirun|mpi4py|an MPI library)",   # lab 02's MPI part: an extra
    r"needs ipyparallel",                   # bench: an extra
    r"needs Linux",                         # signals and /proc; macOS is best effort
    r"needs git",                           # tests of what is in the repository, when run from an archive
    r"needs root",                          # network namespaces
)
# Files that are too slow for `make check`.
SLOW_FILES = ("test_wrong_answers",)


def allowed(reason):
    """True when the reason of a skip is on the list."""
    return any(re.search(pattern, reason) for pattern in ALLOWED_SKIPS)


def refuse(report):
    """A skip that nobody allowed becomes a failure that says so."""
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if report.skipped and not hasattr(report, "wasxfail") and not allowed(reason):
        report.outcome = "failed"
        report.longrepr = f"{reason}\nThis skip is not allowed: see ALLOWED_SKIPS in tests/conftest.py."


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    refuse((yield).get_result())


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report(collector):
    refuse((yield).get_result())


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.stem.startswith(SLOW_FILES):
            item.add_marker(pytest.mark.slow)


def pytest_configure(config):
    # Checks record progress: in tests it goes to a folder of this run, never to the checkout.
    if "RANKLAB_HOME" not in os.environ:
        home = os.environ["RANKLAB_HOME"] = tempfile.mkdtemp(prefix="ranklab-test-")
        config.add_cleanup(lambda: shutil.rmtree(home, ignore_errors=True))


@pytest.fixture
def python():
    """The interpreter the tests run under, for subprocesses."""
    return sys.executable
