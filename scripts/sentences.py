"""What the scripts say when they can't go on: one sentence, never a traceback.

Like setup.py: standard library only, and nothing newer than Python 3.6 in the syntax.
"""
import platform
import sys

OLDEST, NEWEST = (3, 11), (3, 13)          # both were tried with the pins
SPACE_NEEDED, SPACE_FOR_CUDA = 3e9, 10e9   # bytes: .venv with CPU wheels; with CUDA libraries
AGAIN = "then run the same command again"
# What pip and uv print, in lower case, when nothing can be fetched.
NO_NETWORK = ("newconnectionerror", "connection refused", "name resolution", "timed out",
              "name or service not known", "connecttimeout", "proxyerror", "connection reset",
              "network is unreachable", "dns error", "error sending request", "failed to fetch",
              "remotedisconnected", "certificate verify failed")


class Stop(Exception):
    """One sentence for the person at the keyboard."""


def said_once(work, of_system):
    """The exit code of `work()`; what stopped it stands on stderr, in one sentence.

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


def explain(output, code):
    """The sentence for a failed install, from what pip or uv printed."""
    text = output.lower()
    if "no space left" in text or "errno 28" in text:
        return ("The disk filled up while installing: free some space (TORCH=cpu needs about "
                "%.0f GB, CUDA up to %.0f GB), %s."
                % (SPACE_NEEDED / 1e9, SPACE_FOR_CUDA / 1e9, AGAIN))
    if any(sign in text for sign in NO_NETWORK):
        return ("The package index can't be reached: check the network (and pip's settings, such "
                "as a proxy or PIP_INDEX_URL), %s; nothing is lost." % AGAIN)
    if "no matching distribution" in text or "no solution found" in text:
        return ("A pinned package has no build for Python %s on %s %s (see above): ranklab wants "
                "Python 3.%d to 3.%d, so try for instance `make lab PYTHON=python3.12`."
                % (platform.python_version(), platform.system(), platform.machine(),
                   OLDEST[1], NEWEST[1]))
    last = [line for line in output.splitlines() if line.strip()][-1:] or ["no message"]
    return "The set-up stopped with code %d: %s" % (code, last[0].strip())
