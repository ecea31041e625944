"""Print step times: ZeRO and tensor parallelism, ours and their peers'; a part of `make bench`.

All train one GPT, on the same ranks, in turns: a busy moment hits all of them. Nothing is asserted.
"""
import contextlib
import functools
import importlib.util
import statistics

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import loss_parallel

from ranklab import device, launch
from ranklab.models.gpt import GPT, GPTConfig
from ranklab.peers.deepspeed_zero import deepspeed_engine
from ranklab.peers.dtensor import parallelize_gpt
from ranklab.projects.clock import in_turns
from ranklab.tensor_parallel import TPConfig, parallel_gpt
from ranklab.zero import ZeroStage1, ZeroStage2, ZeroStage3

RANKS, ROUNDS = 2, 20
GPT_SIZE = GPTConfig(n_layer=4, n_embd=256)  # 3.2 million parameters
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-4)


def ours(stage_class, module):
    model = stage_class(module)
    return stepping(model, model.make_optimizer(ADAMW))


def fsdp2(module):
    for block in module.blocks.values():
        fully_shard(block)
    fully_shard(module)
    return stepping(module, ADAMW(module.parameters()))


def stepping(model, optimizer, around_backward=contextlib.nullcontext):
    def step(tokens):
        optimizer.zero_grad()
        loss = model(tokens, tokens)
        with around_backward():
            loss.backward()
        optimizer.step()

    return step


def deepspeeds(stage, module):
    engine = deepspeed_engine(module, ADAMW, stage)

    def step(tokens):
        engine.backward(engine(tokens, tokens))
        engine.step()

    return step


def tensor_parallel(how, module):
    model = parallel_gpt(module, TPConfig(**how))
    return stepping(model, ADAMW(model.parameters()))


def dtensor(sequence_parallel, module):
    mesh = init_device_mesh(device().type, (RANKS,))
    model = parallelize_gpt(module, mesh, sequence_parallel)
    return stepping(model, ADAMW(model.parameters()), loss_parallel)


ZERO = {f"our stage {number}": functools.partial(ours, each)
        for number, each in enumerate((ZeroStage1, ZeroStage2, ZeroStage3), 1)}
ZERO["FSDP2"] = fsdp2
THEIRS = {f"DeepSpeed's {stage}": functools.partial(deepspeeds, stage) for stage in (1, 2, 3)}
TENSOR = {"ours": functools.partial(tensor_parallel, {}),
          "ours, overlap": functools.partial(tensor_parallel, {"overlap": True}),
          "ours, sequence": functools.partial(tensor_parallel, {"sequence_parallel": True}),
          "DTensor, sequence": functools.partial(dtensor, True),
          "DTensor": functools.partial(dtensor, False)}


def seconds_of_steps(ways):
    steps = {name: make(GPT(GPT_SIZE).to(device())) for name, make in ways.items()}
    tokens = torch.randint(256, (4, 64), device=device())
    return in_turns({name: functools.partial(step, tokens) for name, step in steps.items()}, ROUNDS)


def compare(ways, reference):
    """Print the table of `ways`: medians, and the median ratio to `reference` in the same round."""
    seconds = launch(seconds_of_steps, ways, ranks=RANKS, timeout=300)[0]
    print(f"a step of a GPT with 3.2 million parameters, {RANKS} ranks, median of {ROUNDS}; "
          f"beside it the median ratio to {reference}'s step in the same round")
    for name, each in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(each, seconds[reference]))
        print(f"    {name:18} {1000 * statistics.median(each):6.0f} ms   {ratio:5.2f}")


def main():
    ways = dict(ZERO)
    if importlib.util.find_spec("deepspeed"):
        ways |= THEIRS
    else:
        print("DeepSpeed is left out: python -m pip install -c constraints.txt deepspeed")
    compare(ways, "FSDP2")
    print("aim: our stage 3 within 1.15 of FSDP2")
    compare(TENSOR, "DTensor")
    print("aim: ours at most 0.8 of DTensor")


if __name__ == "__main__":
    main()
