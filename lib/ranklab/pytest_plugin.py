"""The pytest plugin: a test runs on fresh ranks, with the fixture `ranks` or the mark `ranks`.

    def test_total(ranks):                         @pytest.mark.ranks(4)
        assert ranks(total, ranks=4) == [6] * 4    def test_total():      # all of it, on each rank
                                                       assert total() == 6

pytest loads this module in every project of its environment, so torch is imported only by the first
test that needs ranks. The functions of a test's module are sent by value: with pytest's rewritten
asserts, and without a second import of the module on each rank. Fixtures run once, in pytest's own
process; each rank gets a copy of their values.
"""

import contextlib
import sys
import unittest

import pytest

RANKS = 4
REWRITTEN = "_pytest.assertion.rewrite"  # what a rewritten assert calls


def pytest_configure(config):
    config.addinivalue_line("markers", "ranks(ranks=4, **options): the test runs on fresh ranks, "
                            "all at once; the options are those of ranklab.launch")


@pytest.fixture
def ranks(request):
    """Return ranks(fn, *args, ranks=4, timeout=60, ...), which is ranklab.launch.

    It accepts the functions of the test's module.
    """

    def run(fn, *args, ranks=RANKS, **options):
        __tracebackhide__ = True
        return _launch(request.module, fn, args, ranks, **options)

    return run


def pytest_runtest_setup(item):
    is_of_unittest = issubclass(getattr(item, "cls", None) or object, unittest.TestCase)
    if is_of_unittest and item.get_closest_marker("ranks"):
        pytest.fail("the mark `ranks` can't run a method of unittest.TestCase: make it a function, "
                    "or a method of a plain class", pytrace=False)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run a marked test on its ranks; fail it if a rank raises or hangs."""
    mark = pyfuncitem.get_closest_marker("ranks")
    if not mark:
        return None
    skips, failure = _outcome(pyfuncitem, *mark.args, **mark.kwargs)
    if failure:
        pytest.fail(failure, pytrace=False)
    if reasons := [reason for reason in skips if reason is not None]:
        pytest.skip(reasons[0])
    return True


def _outcome(item, ranks=RANKS, **options):
    """Return each rank's reason to skip the test, or None; and the failure's text, or None."""
    from ranklab.engine import RankError, ship

    arguments = {name: item.funcargs[name] for name in item._fixtureinfo.argnames}
    try:
        return _launch(item.module, _test, (item.obj, arguments), ranks, **options), None
    except TypeError as error:
        return [], str(ship.what_stays(arguments) or error)
    except (RankError, ValueError) as error:
        return [], str(error)


def _test(test, arguments):
    """Run the test on this rank; return its reason for being skipped, or None."""
    try:
        value = test(**arguments)
    except pytest.skip.Exception as skipped:
        return skipped.msg or ""
    if value is not None:  # also a coroutine, which would never be awaited
        raise TypeError(f"the test returned a {type(value).__name__}; it must return None")


def _launch(module, fn, args, ranks, preload=(), **options):
    __tracebackhide__ = True
    from ranklab import launch

    with _by_value(module):
        return launch(fn, *args, ranks=ranks, preload=(REWRITTEN, *preload), **options)


@contextlib.contextmanager
def _by_value(module):
    import cloudpickle

    is_new = (sys.modules.get(module.__name__) is module
              and module.__name__ not in cloudpickle.list_registry_pickle_by_value())
    if is_new:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        if is_new:
            cloudpickle.unregister_pickle_by_value(module)
