"""What the scripts say when they can't go on: one sentence, never a traceback.

Like setup.py: standard library only, and nothing newer than Python 3.6 in the syntax.
"""
import platform
import sys

OLDEST, NEWEST = (3, 11), (3, 14)          # all tests ran on the oldest: docs/status.md
SPACE_NEEDED, SPACE_FOR_CUDA = 3e9, 10e9   # bytes: .venv with CPU wheels; with CUDA libraries
AGAIN = "then run the same command again"
# What pip and uv print, in lower case, for each way to fail; the first that is found counts.
SIGNS = (
    ("disk", ("no space left", "errno 28")),
    ("no build", tuple("(from versions: %d" % digit for digit in range(10))),
    ("closed", ("401 unauthorized", "403 forbidden", "http error 401", "http error 403",
                "401 client error", "403 client error", "proxy authentication required")),
    ("network", ("newconnectionerror", "connection refused", "name resolution", "timed out",
                 "name or service not known", "connecttimeout", "proxyerror", "connection reset",
                 "network is unreachable", "dns error", "request failed after",
                 "failed to fetch", "remotedisconnected", "certificate verify failed")),
    ("nothing", ("(from versions: none)", "not found in the")),
    ("no build", ("no matching distribution", "no version of", "no versions of", "no wheels")),
    ("conflict", ("no solution found",)),
)


class Stop(Exception):
    """One sentence for the person at the keyboard.

    cause  the word for it, of SIGNS; "torch's index" where PyTorch's alone can't be reached
    """

    def __init__(self, sentence, cause=""):
        Exception.__init__(self, sentence)
        self.cause = cause


def said_once(work, of_system):
    """Return the exit code of `work()`; print what stopped it on stderr, in one sentence.

    of_system  makes the sentence for an OSError: a folder that can't be written, a full disk
    """
    try:
        work()
    except Stop as stop:
        sys.stderr.write("\n%s\n" % stop)
        return 1
    except OSError as error:
        sys.stderr.write("\n%s\n" % of_system(error))
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\nStopped. Nothing is broken: run the same command again to go on.\n")
        return 130
    return 0


def cause(output):
    """Return in a word why an install failed, from what pip or uv printed; "" where that is new."""
    text = output.lower()
    return next((word for word, signs in SIGNS if any(sign in text for sign in signs)), "")


def explain(output, code):
    """Return the sentence for a failed install, from what pip or uv printed."""
    here = "Python %s on %s %s" % (platform.python_version(), platform.system(),
                                   platform.machine())
    last = [line for line in output.splitlines() if line.strip()][-1:] or ["no message"]
    return {
        "disk": "The disk filled up while installing: free some space (TORCH=cpu needs about "
                "%.0f GB, CUDA up to %.0f GB), %s."
                % (SPACE_NEEDED / 1e9, SPACE_FOR_CUDA / 1e9, AGAIN),
        "conflict": "The pinned versions do not fit each other or %s, or this package index lacks "
                    "one (see above): `git pull`, or take another Python, for instance `make lab "
                    "PYTHON=python3.12`; docs/pins.md says how pins are moved." % here,
        "closed": "The package index refuses this machine (401 or 403): it wants a login, or is "
                  "closed to you; ask whoever runs it, or name another (PIP_INDEX_URL), %s."
                  % AGAIN,
        "network": "The package index can't be reached: check the network (and pip's settings, "
                   "such as a proxy or PIP_INDEX_URL), %s; nothing is lost." % AGAIN,
        "nothing": "The package index shows nothing at all of what is asked for (see above): it "
                   "is closed to this machine (see `pip config list`), or has no build for %s; "
                   "ranklab wants Python 3.%d to 3.%d." % (here, OLDEST[1], NEWEST[1]),
        "no build": "A pinned package has no build for %s (see above): ranklab wants Python 3.%d "
                    "to 3.%d, so try for instance `make lab PYTHON=python3.12`."
                    % (here, OLDEST[1], NEWEST[1]),
    }.get(cause(output), "The set-up stopped with code %d: %s" % (code, last[0].strip()))
