"""A neighbour keeps a copy of each rank's shard in memory, so a dead rank's state needs no disk.

Gemini does this (SOSP 2023). This is its simplest form: one copy, on the next node of a ring. A
simplification: the copy is sent in one piece after a step, not in parts while the network is idle.
"""

import torch
import torch.distributed as dist

from ranklab.engine import device


class Neighbour:
    """This rank's own snapshot and a copy of the previous rank's shard, in CPU memory.

    distance  the copy is `distance` ranks away; use the number of ranks on a node, so that the
              copy is on another node
    Two generations are kept. If a rank dies in the middle of keep(), some ranks have the new
    generation and others do not, but the previous one is complete on all ranks.
    """

    def __init__(self, distance=1):
        self.distance = distance
        self.kept = {}  # {step: (own bytes, bytes of the rank before)}, two at most

    def keep(self, step, shard, group=None):
        """Copy each rank's state at `step` into its own memory and its neighbour's.

        Call this every k steps, on all ranks.
        shard: list of all tensors that only this rank has, in the same order at each call. Shards
            may differ in size between ranks.
        Cost: the bytes of the shard and 8 more, in two messages.
        """
        shard_bytes = as_bytes(shard).to(device())
        size = torch.tensor([shard_bytes.numel()], device=shard_bytes.device)
        copy = torch.empty(int(self._shift(size, torch.empty_like(size), group)),
                           dtype=torch.uint8, device=shard_bytes.device)
        self._shift(shard_bytes, copy, group)
        self.kept[step] = shard_bytes.cpu(), copy.cpu()
        for old in sorted(self.kept)[:-2]:
            del self.kept[old]

    def recover(self, shard, group=None):
        """Restore each tensor of `shard` to one step, the same on all ranks; return that step.

        All ranks of the new group must call this, including the replacements of dead processes.
        A replacement has kept nothing, and passes new tensors of the same shapes.
        Cost: each rank gathers 16 bytes from all others; a dead rank's neighbour sends the copy of
            its shard.
        Raises: RuntimeError, on every rank, if the holder of a dead rank's copy is dead as well.
        """
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        steps = torch.tensor((sorted(self.kept) + [-1, -1])[:2], device=device())
        all_steps = [torch.empty_like(steps) for _ in range(size)]
        dist.all_gather(all_steps, steps, group=group)
        all_steps = [set(row.tolist()) - {-1} for row in all_steps]
        dead = [r for r, steps in enumerate(all_steps) if not steps]
        holders = {r: (r + self.distance) % size for r in dead}
        alive = [steps for steps in all_steps if steps]
        common = set.intersection(*alive) if alive else set()
        lost_ranks = [r for r in dead if holders[r] in dead]
        if lost_ranks or not common:
            raise RuntimeError(f"ranks {dead} are new, and nobody has a copy of ranks "
                               f"{lost_ranks or dead}: load the last checkpoint from the disk")
        step = max(common)
        for r in dead:
            if rank == holders[r]:
                dist.send(self.kept[step][1].to(device()), group=group, group_dst=r)
            elif rank == r:
                shard_bytes = as_bytes(shard).to(device())
                dist.recv(shard_bytes, group=group, group_src=holders[r])
                _unpack_bytes(shard_bytes, shard)
        if rank not in dead:
            _unpack_bytes(self.kept[step][0].to(device()), shard)
        self.kept.clear()  # the dead ranks' copies of others are gone: keep() again
        return step

    def _shift(self, x, buffer, group):
        """Send `x` to the rank `distance` ahead; receive into `buffer` from `distance` behind."""
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        if self.distance % size == 0:
            raise ValueError(f"distance={self.distance} on {size} ranks: that is the rank itself")
        for work in dist.batch_isend_irecv([
                dist.P2POp(dist.isend, x, group=group, group_peer=(rank + self.distance) % size),
                dist.P2POp(dist.irecv, buffer, group=group,
                           group_peer=(rank - self.distance) % size)]):
            work.wait()
        return buffer


def as_bytes(tensors):
    """Return the bytes of all these tensors, of any types, in one flat uint8 tensor."""
    return torch.cat([t.detach().contiguous().view(-1).view(torch.uint8) for t in tensors])


def _unpack_bytes(flat, tensors):
    with torch.no_grad():
        for tensor, piece in zip(tensors, flat.split([tensor.nbytes for tensor in tensors])):
            tensor.copy_(piece.clone().view(tensor.dtype).view(tensor.shape))


def lost_together(nodes):
    """Return the probability that two dead nodes, in a ring of `nodes`, lose a shard and its copy.
    """
    return min(1.0, 2 / (nodes - 1))
