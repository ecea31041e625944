"""Lab 09: what goes wrong when real ranks run a schedule."""

import torch.distributed as dist
from mutants import mutant

from ranklab.pipeline_parallel import PipelineExecutor

IF_STAGE = "        if stage:\n            x"
TAKE = "self.take_activations(stage, m).requires_grad_(torch.is_grad_enabled())"
GRADIENT = "gradient = self.take_gradients(stage, m)"
ISEND = "dist.isend(tensor, group=self.group, group_dst=peer)"
SEND = f"self.sends.append(({ISEND}, tensor))"
IRECV = "dist.irecv(tensor, group=self.group, group_src=peer)"
RECEIVE = f"target[stage, m] = {IRECV}, tensor"
LOSS = "self.loss += y.detach() * self.weight"
OUTPUT = "self.activations_out[stage, m] = y.detach()"
INPUT_GRADIENT = "self.gradients_out[stage, m] = x.grad"
ONES = "torch.ones_like(y) * (self.weight * self.scale)"
FORWARD = "        if stage == self.last:\n            self.loss"


def _wrong(*edits, says, **named):
    return mutant(PipelineExecutor, *edits, says=says, **named)


WRONG = [
    _wrong(f"x = {TAKE}", f"x = {TAKE[:TAKE.index('.requires')]}\n"
           "        x = x.requires_grad_(torch.is_grad_enabled())", says="tokens get no gradient"),
    _wrong(IF_STAGE, "        if True:\n            x", says="Stage 0 gets no message"),
    _wrong("source.pop((stage, m))", "source[stage, m]", says="left in .*_out"),
    _wrong(TAKE, "self.take_activations(stage, m)", says="its input is a leaf"),
    _wrong(OUTPUT, OUTPUT.replace(".detach()", ""), says=r"without a graph, y\.detach\(\)"),
    _wrong(LOSS, "self.loss += y.detach()", says="loss of batch 1 is not weighted"),
    _wrong(LOSS, "self.loss += y.detach() / len(self.pieces)", says="one over the targets"),
    _wrong(SEND, ISEND, says=r"leaves no \(handle, tensor\)"),
    _wrong(GRADIENT, f"{GRADIENT}\n            self.gradients_out[\"used\", stage, m] = gradient",
           called="keeps_gradients", says="bytes kept after training"),
    _wrong("        y = self", "        self.inputs = [*getattr(self, 'inputs', []), x.detach()]\n"
           "        y = self", says="bytes kept after training", called="keeps_all_inputs"),
    _wrong(OUTPUT, f"{OUTPUT}\n            self.outputs = [*getattr(self, 'outputs', []), y.data]",
           says="bytes kept after training", called="keeps_all_outputs"),
    _wrong("self.activations.pop((stage, m))", "self.activations[stage, m]",
           says=r"pop\(\) what is used"),
    _wrong(RECEIVE, f"{RECEIVE}\n        target[stage, m][0].wait()", says=r"receive\(\) waits"),
    _wrong(INPUT_GRADIENT, "pass", says="KeyError.*gradients_out.*for SB"),
    _wrong(SEND, f"handle = {ISEND}\n        handle.wait()\n        self.sends.append("
           "(handle, tensor))", says=r"send\(\) waits"),
    _wrong(SEND, f"self.sends.append(({ISEND}, None))", called="the_tensor_may_go",
           says=r"leaves no \(handle, tensor\)"),
    _wrong(SEND, SEND.replace("group=self.group, group_dst=peer", "dst=peer"),
           says="Pass self.group on"),
    _wrong(IRECV, IRECV.replace("group_src=peer", "src=peer"), says="Pass self.group on",
           called="receives_from_a_global_rank"),
    _wrong(FORWARD, FORWARD.replace("self.last", "max(self.stages)"),
           says="last stage of all, self.last"),
    _wrong(ONES, "torch.ones_like(y)", says="neither weighted nor scaled"),
    _wrong(ONES, "torch.ones_like(y) * self.weight", says="gradient of stage . is not scaled"),
    _wrong("y.backward(gradient)", "y.backward(gradient * self.weight)", says="others begin "
           "with the next stage's gradient", called="weighted_by_each_stage"),
    _wrong(".contiguous()", "", says="tensor.contiguous"),
    _wrong("        if torch.is_grad_enabled():\n            self.activations", "        if True:\n"
           "            self.activations", says=". activations kept without gradients"),
    _wrong("self.stages[stage](x, targets)", "self.stages[stage](self.pieces[m][0], targets)",
           says="its input is a leaf",
           called="every_stage_gets_the_inputs"),
    _wrong(' if kind == "SF" else self.gradients_out', "", says="for SB"),
    _wrong(GRADIENT, "gradient = torch.ones_like(y)", says="messages were never waited for"),
    _wrong(GRADIENT, "gradient = self.gradients_in.pop((stage, m))[1] if (stage, m) in "
           "self.gradients_in else self.take_gradients(stage, m)",
           says="messages were never waited for", called="used_without_a_wait"),
    _wrong("with self.deferral(action):", "if True:", says="an I leaves nothing for its W"),
    _wrong(LOSS, "self.loss += y * self.weight", says="a graph keeps all that it comes from"),
    _wrong("self.activations[stage, m] = x, y", "self.activations[stage, m] = x, y\n"
           "            self.all = [*getattr(self, 'all', []), y]", says="activations at once, not",
           called="a_list"),
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
        source = self.activations_out if kind == "SF" else self.gradients_out
        dist.send(source.pop((stage, m)), group=self.group, group_dst=peer)
