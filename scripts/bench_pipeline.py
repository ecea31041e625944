"""Print the step times of a pipeline: ours and torch's; a part of `make bench`.

Both train one GPT, on the same ranks, in turns: a busy moment hits both. Nothing is asserted.
"""
import statistics
import time

import torch

from ranklab import device, launch
from ranklab.models.gpt import GPTConfig
from ranklab.projects.clock import wait_for_all
from ranklab.projects.pipeline_parallel import peers

RANKS, ROUNDS, WARM_UP = 2, 20, 4
SHAPE = GPTConfig(n_layer=6, n_embd=128)  # 1.2 million parameters


def seconds_of_steps(name):
    """{way: seconds of each step, until the slowest rank is done}, in rounds of one step each."""
    steps = {way: way(name, SHAPE) for way in (peers.ours, peers.torchs)}
    x, seconds = torch.randint(256, (2 * peers.PIECES, 64), device=device()), {}
    for number in range(WARM_UP + ROUNDS):
        for way in sorted(steps, key=lambda way: (way is peers.ours) ^ (number % 2)):
            model, step = steps[way]
            model.zero_grad()
            wait_for_all()
            started = time.perf_counter()
            step(x, x)
            wait_for_all()
            if number >= WARM_UP:
                seconds.setdefault(way.__name__, []).append(time.perf_counter() - started)
    return seconds


def main():
    print(f"forward and backward of a GPT with 1.2 million parameters, {peers.PIECES} micro-batches"
          f", {RANKS} ranks, median of {ROUNDS}; and the median ratio in the same round")
    for name in ("1f1b", "interleaved"):
        seconds = launch(seconds_of_steps, name, ranks=RANKS, timeout=300)[0]
        ms = [1000 * statistics.median(seconds[way]) for way in ("ours", "torchs")]
        ratio = statistics.median(a / b for a, b in zip(seconds["ours"], seconds["torchs"]))
        print(f"    {name:12} ours {ms[0]:6.1f} ms   torch {ms[1]:6.1f} ms   {ratio:5.2f}")
    print("aim: ours within 1.15 of torch")


if __name__ == "__main__":
    main()
