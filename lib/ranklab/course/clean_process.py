"""One process that has imported what grading needs, and is forked for each notebook and exercise.

A fresh interpreter would spend seconds on importing torch, and so would the server of its ranks. No
learner's code ever runs in this process, and nothing of a submission is sent to it: what a fork is
given is a file that the fork alone reads.
"""

import contextlib
import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from ranklab.course import labs
from ranklab.engine.cheap_forks import cheap_forks
from ranklab.engine.forkserver import ENVIRON
from ranklab.engine.server import PRELOAD, die_with

PACKAGES = str(Path(__file__).parents[2])
START = ("import sys; from ranklab.course import clean_process; "
         "clean_process.serve(int(sys.argv[1]))")


class CleanProcess:
    """The grader's handle on it: it starts with the first fork, and again if one has killed it."""

    process, has_fork = None, False

    def fork(self, function, folder, environ, *descriptors):
        """A fork runs `function` of regrade.py; its standard input and its pipe are given."""
        if self.process is None:
            self._start()
        request = json.dumps([function, str(folder), environ]).encode()
        socket.send_fds(self.line, [request], descriptors)
        self.has_fork = True

    def _start(self):
        self.line, theirs = socket.socketpair()
        self.line.setblocking(False)
        self.tmp = tempfile.TemporaryDirectory(prefix="ranklab-")  # importing torch leaves a folder
        paths = filter(None, [PACKAGES, os.environ.get("PYTHONPATH")])
        with theirs:
            self.process = subprocess.Popen(
                # -P: a learner's json.py is not Python's, at least until Python's is imported.
                [sys.executable, "-P", "-c", START, str(theirs.fileno())],
                env={**os.environ, **ENVIRON, "TMPDIR": self.tmp.name,
                     "PYTHONPATH": os.pathsep.join(paths)},
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, start_new_session=True)

    def fork_has_ended(self):
        """Also True when this process has ended, because its fork ends with it."""
        with contextlib.suppress(BlockingIOError):
            if self.has_fork:
                if not self._answer():
                    self.close()
                self.has_fork = False
        return not self.has_fork

    def _answer(self):
        try:
            return self.line.recv(1)
        except ConnectionError:
            return b""

    def close(self):
        """It is gone, if it was there."""
        if self.process:
            self.line.close()
            self.process.kill()
            self.process.wait()
            self.tmp.cleanup()
        self.process, self.has_fork = None, False


def serve(line):
    """Forks, one at a time, until the grader is gone."""
    die_with(os.getppid())
    line = socket.socket(fileno=line)
    with cheap_forks():
        for name in (*PRELOAD, "IPython.core.interactiveshell", "ranklab.course.regrade"):
            importlib.import_module(name)
        for stem in labs.written():
            labs.checks_of(stem)
    while True:
        request, descriptors, _, _ = socket.recv_fds(line, 1 << 16, 2)
        if not request:
            return
        if (child := os.fork()) == 0:
            try:
                line.close()
                _become(*json.loads(request), *descriptors)
            finally:
                os._exit(1)
        for descriptor in descriptors:
            os.close(descriptor)
        os.waitpid(child, 0)
        line.send(b".")


def _become(function, folder, environ, given, pipe):
    """This fork runs the function as a separate process would."""
    from ranklab.course import regrade

    die_with(os.getppid())
    os.setsid()
    os.chdir(folder)
    os.environ.update(environ)
    tempfile.tempdir = None  # $TMPDIR is another now
    os.dup2(given, 0)
    os.close(given)
    getattr(regrade, function)(pipe)
