"""Why an allocation can fail while enough bytes are free."""


class Arena:
    """Allocate pieces of a memory of `size` bytes, each in the first gap that is large enough.

    This is simplified: torch's allocator also rounds sizes and keeps freed pieces for reuse.
    """

    def __init__(self, size):
        self.size = size
        self.pieces = {}  # name -> (start, size)

    def gaps(self):
        """List (start, size) of the free gaps, from low to high."""
        gaps, end = [], 0
        for start, size in sorted(self.pieces.values()):
            if start > end:
                gaps.append((end, start - end))
            end = start + size
        return gaps + ([(end, self.size - end)] if end < self.size else [])

    @property
    def free_bytes(self):
        return sum(size for _, size in self.gaps())

    @property
    def largest_gap(self):
        return max((size for _, size in self.gaps()), default=0)

    def take(self, name, size):
        """Allocate the piece `name` of `size` bytes."""
        for start, room in self.gaps():
            if room >= size:
                self.pieces[name] = (start, size)
                return
        raise MemoryError(
            f"{size} bytes wanted for {name}, {self.free_bytes} are free, "
            f"but the largest gap has {self.largest_gap}"
        )

    def give_back(self, name):
        """Free the piece `name`; no other piece moves."""
        del self.pieces[name]
