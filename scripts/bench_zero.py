"""Print the step times of ZeRO: ours, torch's FSDP2 and DeepSpeed's; a part of `make bench`.

All train one GPT, on the same ranks, in turns: a busy moment hits all of them. Nothing is asserted.
"""
import functools
import importlib.util
import statistics
import time

import torch
from torch.distributed.fsdp import fully_shard

from ranklab import device, launch
from ranklab.models.gpt import GPT, GPTConfig
from ranklab.projects.clock import wait_for_all
from ranklab.zero import ZeroStage1, ZeroStage2, ZeroStage3
from ranklab.zero.deepspeed_engine import deepspeed_engine

RANKS, ROUNDS, WARM_UP = 2, 20, 4
GPT_SIZE = GPTConfig(n_layer=4, n_embd=256)  # 3.2 million parameters
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-4)
REFERENCE = "FSDP2"


def ours(stage_class, module):
    model = stage_class(module)
    return stepping(model, model.make_optimizer(ADAMW))


def fsdp2(module):
    for block in module.blocks.values():
        fully_shard(block)
    fully_shard(module)
    return stepping(module, ADAMW(module.parameters()))


def stepping(model, optimizer):
    def step(tokens):
        optimizer.zero_grad()
        model(tokens, tokens).backward()
        optimizer.step()

    return step


def deepspeeds(stage, module):
    engine = deepspeed_engine(module, ADAMW, stage)

    def step(tokens):
        engine.backward(engine(tokens, tokens))
        engine.step()

    return step


WAYS = {f"our stage {number}": functools.partial(ours, each)
        for number, each in enumerate((ZeroStage1, ZeroStage2, ZeroStage3), 1)}
WAYS[REFERENCE] = fsdp2
THEIRS = {f"DeepSpeed's {stage}": functools.partial(deepspeeds, stage) for stage in (1, 2, 3)}


def seconds_of_steps(ways, rounds=ROUNDS):
    """{way: seconds of each step, until the slowest rank is done}, in rounds of one step each."""
    steps = {name: make(GPT(GPT_SIZE).to(device())) for name, make in ways.items()}
    tokens, seconds = torch.randint(256, (4, 64), device=device()), {name: [] for name in ways}
    names = list(ways)
    for number in range(WARM_UP + rounds):
        names = [*names[1:], names[0]]  # what comes first finds colder caches
        for name in names:
            wait_for_all()
            started = time.perf_counter()
            steps[name](tokens)
            wait_for_all()
            if number >= WARM_UP:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def main():
    ways = dict(WAYS)
    if importlib.util.find_spec("deepspeed"):
        ways |= THEIRS
    else:
        print("DeepSpeed is left out: python -m pip install -c constraints.txt deepspeed")
    seconds = launch(seconds_of_steps, ways, ranks=RANKS, timeout=300)[0]
    print(f"a step of a GPT with 3.2 million parameters, {RANKS} ranks, median of {ROUNDS}; "
          f"beside it the median ratio to {REFERENCE}'s step in the same round")
    for name, each in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(each, seconds[REFERENCE]))
        print(f"    {name:13} {1000 * statistics.median(each):6.0f} ms   {ratio:5.2f}")
    print("aim: our stage 3 within 1.15 of FSDP2")


if __name__ == "__main__":
    main()
