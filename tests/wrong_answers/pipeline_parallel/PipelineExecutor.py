"""Lab 09: what goes wrong when real ranks run a schedule."""

import torch.distributed as dist
from mutants import mutant

from ranklab.pipeline_parallel import PipelineExecutor

TAKE = 'self.take("F", stage, m).requires_grad_(torch.is_grad_enabled())'
SEND = "self.leaving.append((dist.isend(tensor, group=self.group, group_dst=peer), tensor))"
RECEIVE = "dist.irecv(tensor, group=self.group, group_src=peer)"
LOSS = "self.loss += y.detach() * self.weight"
THERE = 'self.there["F", stage + 1, m] = y.detach()'
BEFORE = 'self.there["B", stage - 1, m] = x.grad'
ONES = "torch.ones_like(y) * (self.weight * self.scale)"
FORWARD = "        if stage == self.last:\n            self.loss"


def _wrong(*edits, says, **named):
    return mutant(PipelineExecutor, *edits, says=says, **named)


WRONG = [
    _wrong(f"{TAKE} if stage else inputs", f"({TAKE[:TAKE.index('.requires')]} if stage else inputs"
           ").requires_grad_(torch.is_grad_enabled())", says="tokens get no gradient"),
    _wrong(" if stage else inputs", "", says="Stage 0 gets no message"),
    _wrong("self.there.pop((", "self.there[(", "else -1), m))", "else -1), m)]",
           says="left in self.there"),
    _wrong(TAKE, 'self.take("F", stage, m)', says="its input is a leaf"),
    _wrong(THERE, THERE.replace(".detach()", ""), says=r"without a graph, y\.detach\(\)"),
    _wrong(LOSS, "self.loss += y.detach()", says="loss of batch 1 is not weighted"),
    _wrong(LOSS, "self.loss += y.detach() / len(self.pieces)", says="one over the targets"),
    _wrong(SEND, "dist.isend(tensor, group=self.group, group_dst=peer)",
           says=r"leaves no \(handle, tensor\)"),
    _wrong("gradient = self.take(\"B\", stage, m)", "gradient = self.take(\"B\", stage, m)\n"
           "            self.there[\"used\", stage, m] = gradient", called="keeps_gradients",
           says="bytes kept after training"),
    _wrong(f"{TAKE} if stage else inputs", f"{TAKE} if stage else inputs\n        self.inputs = "
           "[*getattr(self, 'inputs', []), x.detach()]", says="bytes kept after training",
           called="keeps_all_inputs"),
    _wrong(THERE, f"{THERE}\n            self.outputs = [*getattr(self, 'outputs', []), y.data]",
           says="bytes kept after training", called="keeps_all_outputs"),
    _wrong("self.kept.pop((stage, m))", "self.kept[stage, m]", says=r"pop\(\) what is used"),
    _wrong(RECEIVE, f"{RECEIVE}\n        handle.wait()", says=r"receive\(\) waits"),
    _wrong(BEFORE, "pass", says="KeyError.*there.*for SB"),
    _wrong(SEND, f"handle = {SEND[21:-10]}\n        handle.wait()\n        self.leaving.append("
           "(handle, tensor))", says=r"send\(\) waits"),
    _wrong(SEND, f"self.leaving.append(({SEND[21:-10]}, None))", called="the_tensor_may_go",
           says=r"leaves no \(handle, tensor\)"),
    _wrong(SEND, SEND.replace("group=self.group, group_dst=peer", "dst=peer"),
           says="Pass self.group on"),
    _wrong(RECEIVE, RECEIVE.replace("group_src=peer", "src=peer"), says="Pass self.group on",
           called="receives_from_a_global_rank"),
    _wrong(FORWARD, FORWARD.replace("self.last", "max(self.stages)"),
           says="last stage of all, self.last"),
    _wrong(ONES, "torch.ones_like(y)", says="neither weighted nor scaled"),
    _wrong(ONES, "torch.ones_like(y) * self.weight", says="gradient of stage . is not scaled"),
    _wrong("y.backward(gradient)", "y.backward(gradient * self.weight)", says="others begin "
           "with the next stage's gradient", called="weighted_by_each_stage"),
    _wrong(".contiguous()", "", says="tensor.contiguous"),
    _wrong("        if torch.is_grad_enabled():\n            self.kept", "        if True:\n"
           "            self.kept", says=". activations kept without gradients"),
    _wrong("self.stages[stage](x, targets)", "self.stages[stage](inputs, targets)",
           says="its input is a leaf",
           called="every_stage_gets_the_inputs"),
    _wrong('1 if kind == "SF" else -1', "1", says="for SB"),
    _wrong('gradient = self.take("B", stage, m)', "gradient = torch.ones_like(y)",
           says="messages were never waited for"),
    _wrong('gradient = self.take("B", stage, m)', 'gradient = self.arriving.pop(("B", stage, m))[1]'
           ' if ("B", stage, m) in self.arriving else self.take("B", stage, m)',
           says="messages were never waited for", called="used_without_a_wait"),
    _wrong("with self.later(action):", "if True:", says="an I leaves nothing for its W"),
    _wrong(LOSS, "self.loss += y * self.weight", says="a graph keeps all that it comes from"),
    _wrong("self.kept[stage, m] = x, y", "self.kept[stage, m] = x, y\n            self.all = "
           "[*getattr(self, 'all', []), y]", says="activations at once, not", called="a_list"),
    _wrong("tensor = self.new_hidden(self.pieces[m][0])", "self.buffers = getattr(self, 'buffers', "
           "{})\n        tensor = self.buffers.setdefault((kind, stage, m), self.new_hidden("
           "self.pieces[m][0]))", says="size doesn't match|killed by", called="old_buffers"),
    _wrong("self.pieces[m][0]", "self.pieces[0][0]", says="Mismatch in shape|take"),
]


class PipelineExecutor__derived(PipelineExecutor):
    """calls the library's own"""


class PipelineExecutor__blocking(PipelineExecutor):
    """calls the library's own"""

    def send(self, message):
        kind, stage, m, peer = message
        dist.send(self.there.pop((kind[1], stage + (1 if kind == "SF" else -1), m)),
                  group=self.group, group_dst=peer)
