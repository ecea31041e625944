"""What the ranks print: gathered, and shown once, in rank order, with the rank in front."""

import sys


class Output:
    """Takes bytes of each rank; shows them at the end, or as they come with `stream=True`.

    A terminal's carriage return (a progress bar) is shown as it comes for rank 0 only: bars of
    several ranks would overwrite one another.
    """

    def __init__(self, ranks, stream):
        self._stream = stream
        self._parts = [[] for _ in range(ranks)]  # bytes not shown yet
        self._width = len(str(ranks - 1))

    def feed(self, rank, data: bytes):
        self._parts[rank].append(data)
        if self._stream:
            self._show_whole_lines(rank)

    def _prefix(self, rank):
        return f"[rank {rank:>{self._width}}] "

    def _show_whole_lines(self, rank):
        text = b"".join(self._parts[rank])
        whole, _, rest = text.rpartition(b"\n")
        if whole:
            self._write(rank, whole)
        if b"\r" in rest and rank == 0:
            frame, _, rest = rest.rpartition(b"\r")
            bar = frame.rpartition(b"\r")[2] or rest
            sys.stdout.write("\r" + self._prefix(rank) + bar.decode(errors="replace"))
        self._parts[rank] = [rest]
        sys.stdout.flush()

    def _write(self, rank, text: bytes):
        prefix = self._prefix(rank)
        lines = text.decode(errors="replace").split("\n")
        # Of a bar that rewrote its line only the last state is worth keeping.
        kept = [line.rstrip("\r").rpartition("\r")[2] for line in lines]
        sys.stdout.write("".join(f"{prefix}{line}\n" for line in kept))

    def flush(self):
        """Everything is shown."""
        for rank, parts in enumerate(self._parts):
            text = b"".join(parts)
            if text:
                self._write(rank, text.removesuffix(b"\n"))
            parts.clear()
        sys.stdout.flush()
