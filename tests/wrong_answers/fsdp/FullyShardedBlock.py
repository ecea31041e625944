"""Lab 07: what goes wrong in a block that is gathered and reduced in one message."""

import torch
from mutants import mutant

from ranklab.fsdp import FullyShardedBlock

GATHER = ("self.work = dist.all_gather_single(self.gathered, message, group=self.group, "
          "async_op=True)")
REDUCE = ("work = dist.reduce_scatter_single(shard, grads.flatten(), group=self.group, "
          "async_op=True)")
GUARD = "if not self.parameters or self.is_whole or self.work:"
VIEW = "parts = self.gathered.view(self.ranks, -1).split([p.numbers for p in self.parameters], 1)"
END = "self.work, self.gathered, self.is_whole = None, None, True"
WHOLE = "torch.cat([p.padded_gradient() for p in self.trained], dim=1)"

TOO_MANY = r"bytes of two rounds \[(\('all_gather', \d+\), ){3,}"


def _wrong(*edits, says, **named):
    return mutant(FullyShardedBlock, *edits, says=says, **named)


WRONG = [
    # begin_unshard
    _wrong(GUARD, "if self.is_whole or self.work:", says="may have no parameters"),
    _wrong(GUARD, "if not self.parameters or self.is_whole:", says=TOO_MANY,
           called="gathers_what_is_on_its_way"),
    _wrong(GUARD, "if not self.parameters or self.work:", says=TOO_MANY,
           called="gathers_what_is_whole"),
    _wrong(GATHER, f"{GATHER}\n        self.work.wait()", says=r"begin_unshard\(\) waits"),
    _wrong(GATHER, GATHER.replace(", async_op=True", ""), says=r"begin_unshard\(\) waits",
           called="gathers_at_once"),
    _wrong("p.padded_shard() for p in self.parameters", "p.padded_shard() for p in self.trained",
           says="must send as many"),
    _wrong(GATHER, GATHER.replace("group=self.group, ", ""), says="are those of self.group",
           called="all_ranks_gather"),
    _wrong("message.new_empty(self.ranks * len(message))", "torch.empty(self.ranks * len(message))",
           says="new_empty", torch=torch),
    _wrong("p.padded_shard() for p", "p.shard.detach().flatten() for p",
           says="All ranks send the same lengths"),
    _wrong("p.padded_shard() for p", "p.padded_shard(p.shard.dtype) for p",
           says=r"all_gather.*, not .* in their type", called="gathers_in_the_shards_type"),
    # unshard
    _wrong("        self.work.wait()\n", "        self.work.wait()\n        self.message = self."
           "gathered\n", says="in the end self holds a message"),
    _wrong(END, "self.gathered, self.is_whole = None, True", says="it sets self.work to None",
           called="keeps_the_handle"),
    _wrong("        self.begin_unshard()\n", "", says="begins the gather if nothing"),
    _wrong("        self.work.wait()\n", "", says="waits for self.work|fills every"),
    _wrong("        self.work.wait()\n", "", END, f"self.work.wait()\n        {END}",
           says=r"unshard\(\) waits|Nothing was written", called="fills_before_it_waits"),
    _wrong(VIEW, "parts = self.gathered.split([self.ranks * p.numbers for p in self.parameters])",
           says="All that rank 0 has sent comes first"),
    _wrong(END, "self.work, self.is_whole = None, True", says="the message is still there"),
    _wrong(END, "self.work, self.gathered = None, None", says="self.is_whole is not set",
           called="never_says_whole"),
    # reduce_gradients
    _wrong("        self.reduction = shard, work", "        self.reduction = shard, work\n        "
           "self.whole_gradients = grads", says="in the end self holds .* what was whole",
           called="keeps_gradients"),
    _wrong("        grads /= self.ranks\n", "", says="is 3 times what is right"),
    _wrong("self.reduction = shard, work", "self.reduction = grads[self.rank].clone(), work",
           says="is this rank's own, divided by 3", called="its_own"),
    _wrong("        grads /= self.ranks\n", "", "self.reduction = shard, work",
           "self.reduction = grads[self.rank].clone(), work", called="its_own_undivided",
           says="is still this rank's own"),
    _wrong("grads /= self.ranks", "grads /= dist.get_world_size()",
           says="divided by the number of all ranks"),
    _wrong(WHOLE, WHOLE.replace("p.padded_gradient()", "p.padded_gradient().flatten()").replace(
        "dim=1", "dim=0"), "grads.new_empty(grads.shape[1])",
        "grads.new_empty(len(grads) // self.ranks)",
        says="Row r of the message is for rank r"),
    _wrong("grads /= self.ranks",
           "grads = grads.to(self.trained[0].whole.dtype) / self.ranks",
           says=r"reduce_scatter.*, not .* in the type of padded_gradient",
           called="reduces_in_the_computing_type"),
    _wrong(f"grads = {WHOLE}",
           "for parameter in self.trained:\n            parameter.whole.grad = "
           f"None\n        grads = {WHOLE}", says="once it is in the message, not before"),
    _wrong("        if not self.trained:\n            return\n", "", says="no trained ones"),
    _wrong(REDUCE, f"{REDUCE}\n        work.wait()", says=r"reduce_gradients\(\) waits"),
    _wrong(REDUCE, REDUCE.replace("group=self.group, ", ""), says="are those of self.group",
           called="all_ranks_reduce"),
    _wrong("            parameter.whole.grad = None\n", "            pass\n",
           says="would be added to in the next backward"),
    _wrong(REDUCE, "work = dist.all_reduce(grads, group=self.group, async_op=True)\n"
           "        shard = grads[self.rank]", says="'all_reduce', .*an all-reduce sends"),
    _wrong("p.padded_gradient() for p in self.trained", "p.padded_gradient() for p in "
           "self.parameters", says="frozen|numbers|split|reduce_scatter"),
]
