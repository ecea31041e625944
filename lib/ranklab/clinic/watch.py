"""Watch a run from outside, and kill ranks that can't go on."""

import contextlib
import threading
from pathlib import Path

from ranklab.clinic.hang_detectors import has_difference, is_stuck, process_of
from ranklab.clinic.trace import launches, read

SECONDS = 2  # between two looks
MOST_BYTES = 1 << 22  # of lines to read while the run still writes


class Watch:
    """Repeated looks at the run that writes into this folder."""

    def __init__(self, folder):
        self.folder, self.looks, self.sizes = Path(folder), 0, {}
        self.reason = ""  # or why the ranks were killed, a sentence

    def look(self):
        """Return the Ranks of a launch in which no rank can ever go on; [] if there is none.

        Ranks started by `launch` are left out: it kills ranks that hang by itself.
        """
        self.looks += 1
        for folder in launches(self.folder):
            sizes = [path.stat().st_size for path in sorted(folder.glob("rank*.jsonl"))]
            is_still = self.sizes.get(folder) == sizes
            self.sizes[folder] = sizes
            if is_still or sum(sizes) < MOST_BYTES:
                first, ranks = read(folder), read(folder)
                # Ranks are read one after the other: only what both reads show is true at once.
                if _standing(first) == _standing(ranks) and not any(r.launched for r in ranks) and (
                        is_stuck(ranks) or is_still and has_difference(ranks)):
                    return ranks
        return []


def _standing(ranks):
    return [(r.number, len(r.calls), r.waits, r.fate) for r in ranks]


@contextlib.contextmanager
def watching(folder):
    """Look at the folder every few seconds inside the block; yield the Watch.

    Ranks that can't go on are killed.
    """
    watch, is_over = Watch(folder), threading.Event()

    def look():
        while not is_over.wait(SECONDS):
            if ranks := watch.look():
                watch.reason = (f"its ranks wait for one another, or for one that has returned; "
                                f"they were ended at look {watch.looks}, {SECONDS} s apart")
                for process in filter(None, map(process_of, ranks)):
                    process.kill()
                return

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        is_over.set()
        thread.join()
