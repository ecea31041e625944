"""Lab 07's formula of memory: as much is counted in a step at full width.

There transformers' Llama runs in our FSDP, on tensors without memory.
"""

import dataclasses

import pytest
import torch

from ranklab import launch
from ranklab.fsdp import FullyShardedBlock, Precision, masked_loss
from ranklab.fsdp.memory import Step, predicted_memory
from ranklab.fsdp.shards import sharded_modules
from ranklab.meter import MemoryPeak, posing, without_memory
from ranklab.projects.fsdp import LLAMAS
from ranklab.projects.fsdp.llama import PRELOAD
from ranklab.projects.hugging_face import is_here, offline_transformers

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow,
              pytest.mark.skipif(not is_here(), reason="needs transformers")]

L7 = LLAMAS["7b"] | {"num_hidden_layers": 2}
L1 = {"vocab_size": 1000, "hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": 3,
      "num_attention_heads": 16, "num_key_value_heads": 4, "tie_word_embeddings": True}
CASES = [  # what is held grows by the layer, so a few are enough
    (L7, 4, Step()), (L7, 4, Step(offload=True)), (L7, 4, Step(pieces=2)),
    (L7, 8, Step(micro_batch=4, n_ctx=4096, offload=True)), (L7, 3, Step(precision="fp32")),
    (L1, 4, Step(micro_batch=4, n_ctx=2048, recompute=False)),
]


class Message:
    """A work of torch.distributed that holds a tensor until somebody waits, as NCCL's does."""

    def __init__(self, work, held):
        self.work, self.held = work, held

    def wait(self):
        self.work.wait()
        self.held = None


class HoldingBlock(FullyShardedBlock):
    """FullyShardedBlock under NCCL, whatever the backend."""

    def begin_unshard(self):
        is_new = not self.work
        super().begin_unshard()
        if self.work and is_new:
            n = self.gathered.numel() // self.ranks
            self.work = Message(self.work, self.gathered.new_empty(n))

    def reduce_gradients(self):
        super().reduce_gradients()
        mine, work = self.reduction
        self.reduction = mine, Message(work, mine.new_empty(self.ranks * len(mine)))


def peak_of(shape, step):
    """The Memory of a GPU at the peak of a training step of the Llama of this shape."""
    transformers = offline_transformers()
    # By another name it gets no (T, T) mask, which transformers makes for pretended tensors only.
    transformers.AttentionInterface.register("unmasked", transformers.AttentionInterface()["sdpa"])
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        **shape, use_cache=False, attn_implementation="unmasked"))
    if step.recompute:
        model.activation_checkpointing_enable({"use_reentrant": False})
    computed = torch.bfloat16 if step.precision == "bf16" else None
    for module in (*model.model.layers, model.train()):
        HoldingBlock(module, precision=Precision(computed, torch.float32))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for rows in model.parameters():
        rows.grad = torch.zeros_like(rows)
    optimizer.step()  # makes Adam's moments
    optimizer.zero_grad()
    tokens = torch.zeros(step.micro_batch, step.n_ctx, dtype=torch.long)
    blocks = sharded_modules(model)
    on_the_cpu = ("parameters", "gradients", "optimizer_state") if step.offload else ()
    with MemoryPeak(model, optimizer, gathered=lambda: [
            (block.gathered, [(p.whole, p.whole.grad) for p in block.parameters])
            for block in blocks],
            of=lambda memory: dataclasses.replace(memory, **dict.fromkeys(on_the_cpu, 0))) as found:
        for _ in range(step.pieces):
            masked_loss(model(input_ids=tokens).logits, tokens, tokens.numel()).backward()
        optimizer.step()
    return found.peak


def _pretended(cases):
    """On one rank, that poses as rank 0 of many; tensors have no memory."""
    found = []
    for shape, ranks, step in cases:
        with posing(ranks), without_memory():
            found.append(peak_of(shape, step))
    return found


def test_as_much_as_predicted():
    [found] = launch(_pretended, CASES, ranks=1, timeout=280, preload=PRELOAD)
    for (shape, ranks, step), count in zip(CASES, found):
        said = predicted_memory(shape, ranks, **step._asdict())
        assert said.total == pytest.approx(count.total, rel=0.02), step
        assert said.parameters == pytest.approx(count.parameters, rel=1e-3)


def test_llama_2_7b_on_four_gpus():
    """Its parameters are counted in its model card: 6,738,415,616."""
    full = predicted_memory(LLAMAS["7b"], 4)
    assert full.parameters == pytest.approx(6_738_415_616, rel=1e-5)
    assert full.total == pytest.approx(29.9e9, rel=0.01)
    assert predicted_memory(LLAMAS["7b"], 4, offload=True).total == pytest.approx(4e9, rel=0.05)
