"""Requests to the server of ranks, and its answers: one JSON object per line."""

import json
import socket
import time

ANSWER_LIMIT = 60.0  # seconds for the server to fork one rank; a fork takes milliseconds


class ServerDied(RuntimeError):
    """The process that forks ranks is gone, and its ranks with it."""


class ServerStuck(RuntimeError):
    """The process that forks ranks is alive, but does not answer."""


class Lines:
    """The kernel's end of one launch's connection."""

    def __init__(self, connection):
        self._connection = connection
        self._rest = b""
        self._early = []  # answers that arrived while waiting for a different one

    def request(self, message, fds=()):
        """Send `message`, with descriptors; silently do nothing if the server is gone."""
        line = json.dumps(message).encode() + b"\n"
        try:
            socket.send_fds(self._connection, [line], fds)
        except OSError:
            pass  # read() reports the end of the server

    def wait_for(self, kind, limit=ANSWER_LIMIT):
        """Wait for the next answer of this kind; keep others for read().

        Raises: ServerStuck after `limit` seconds; ServerDied.
        """
        end = time.monotonic() + limit
        try:
            while True:
                self._connection.settimeout(max(end - time.monotonic(), 0.001))
                for message in self._receive():
                    if kind in message:
                        return message
                    self._early.append(message)
        except TimeoutError:
            raise ServerStuck("launch: the process that forks ranks has not answered for "
                              f"{limit:g} s; it was ended, and the next launch starts a new one."
                              ) from None
        finally:
            self._connection.settimeout(None)

    def read(self):
        """Return the answers that have arrived; wait for one if there is none.

        Raises: ServerDied.
        """
        early, self._early = self._early, []
        return early or self._receive()

    def _receive(self):
        try:
            data = self._connection.recv(65536)
        except ConnectionError:
            data = b""
        if not data:
            raise ServerDied("launch: the process that forks ranks has died; "
                             "its ranks went with it. The next launch starts a new one.")
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]
