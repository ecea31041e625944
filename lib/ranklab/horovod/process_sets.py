"""Process sets: collectives among some of the ranks, beside those of all."""

from ranklab.horovod.groups import data_group
from ranklab.horovod.world import background, rank, size


class ProcessSet:
    """The ranks `ranks`; usable from init(process_sets=[...]) or add_process_set to shutdown()."""

    def __init__(self, ranks):
        self.ranks = sorted(ranks)
        self.process_set_id = None

    def included(self):
        """True on the ranks that are in it."""
        return rank() in self.ranks

    def size(self):
        return len(self.ranks) if self.process_set_id is not None else None

    def rank(self):
        """This rank's place in the set."""
        return self.ranks.index(rank()) if self.process_set_id is not None else None


global_process_set = ProcessSet([])  # all ranks; init() fills it
global_process_set.process_set_id = 0


def add_process_set(process_set):
    """`process_set`, or the list of its ranks, can be used from now on; returns the ProcessSet.

    Every rank must call it, also those that are not in the set: it makes a process group.

    error  a rank that does not exist; a set that is there already
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    ranks, thread = tuple(process_set.ranks), background()
    if not ranks or ranks[0] < 0 or ranks[-1] >= size() or len(set(ranks)) < len(ranks):
        raise ValueError(f"a process set of ranks {list(ranks)}: they must be different numbers "
                         f"from 0 to {size() - 1}")
    if ranks in thread.sets.values():
        raise ValueError(f"there is a process set of ranks {list(ranks)} already")
    group = data_group(thread.settings, list(ranks))
    process_set.process_set_id = max(thread.sets) + 1
    if process_set.included():
        thread.groups[process_set.process_set_id] = group
    thread.sets[process_set.process_set_id] = ranks
    thread.added.append(process_set)
    return process_set
