"""The ranks' output: collected, and shown once, in rank order, with the rank in front."""

import re

LIMIT = 10_000_000  # bytes kept per rank until the end: an endless loop may print for a minute


class Output:
    """Collect the output of each rank; show it at the end, or with `stream=True` as it comes.

    A carriage return (a progress bar) is shown as it comes only for rank 0: the bars of several
    ranks would overwrite one another. With `headings`, output shown at the end has a heading such
    as "--- rank 0 ---".
    """

    def __init__(self, ranks, stream, headings=False):
        self._stream = stream
        self._headings = headings and not stream
        self._parts = [bytearray() for _ in range(ranks)]  # not shown yet
        self._left_out = [0] * ranks  # bytes
        self._width = len(str(ranks - 1))
        self._bar = 0  # characters of the progress bar on the screen

    def feed(self, rank, data: bytes):
        part = data[: max(0, LIMIT - len(self._parts[rank]))]
        self._parts[rank] += part
        self._left_out[rank] += len(data) - len(part)
        if self._stream:
            self._show_whole_lines(rank)

    def last_words(self, rank):
        """Return C++'s message about the error that ended the rank, or ""."""
        errors = re.findall(rb"^ +what\(\): +(?:\[.*?\] )?(.+)", self._parts[rank], re.M)
        return errors[-1].decode(errors="replace") if errors else ""

    def _show_whole_lines(self, rank):
        whole, newline, rest = bytes(self._parts[rank]).rpartition(b"\n")
        if newline:
            self._write(rank, whole)
        if b"\r" in rest and rank == 0:
            frames = rest.split(b"\r")
            self._show_bar(next(filter(None, reversed(frames)), b""))
            rest = b"\r" + frames[-1]
        self._parts[rank] = bytearray(rest)
        _print(flush=True)

    def _show_bar(self, frame: bytes):
        bar = self._prefix(0) + frame.decode(errors="replace")
        _print("\r" + bar.ljust(self._bar))
        self._bar = len(bar)

    def _write(self, rank, text: bytes):
        if self._bar:  # whole lines replace the bar; its next frame comes below them
            _print("\r" + " " * self._bar + "\r")
            self._bar = 0
        lines = text.decode(errors="replace").split("\n")
        # If a bar rewrote its line, keep only the last state.
        lines = [line.rstrip("\r").rpartition("\r")[2] for line in lines]
        _print("".join(f"{self._prefix(rank)}{line}\n" for line in lines))

    def _prefix(self, rank):
        return "" if self._headings else f"[rank {rank:>{self._width}}] "

    def flush(self):
        """Show everything that is left."""
        for rank, text in enumerate(self._parts):
            if text and self._headings:
                _print(f"--- rank {rank} ---\n")
            if text:
                self._write(rank, bytes(text).removesuffix(b"\n"))
            if self._left_out[rank]:
                self._write(rank, b"... and %d bytes more" % self._left_out[rank])
            self._parts[rank] = bytearray()
        _print(flush=True)


def _print(text="", flush=False):
    """Print `text`, even if the screen supports only ASCII."""
    try:
        print(text, end="", flush=flush)
    except UnicodeEncodeError as error:
        print(text.encode(error.encoding, "backslashreplace").decode(error.encoding), end="")
