"""Print the step times of a pipeline: ours and torch's; a part of `make bench`.

Both train one GPT, on the same ranks, in turns: a busy moment hits both. Nothing is asserted.
"""
import statistics

import torch

from ranklab import device, launch
from ranklab.models.gpt import GPTConfig
from ranklab.projects.clock import in_turns
from ranklab.projects.pipeline_parallel import peers

RANKS, ROUNDS = 2, 20
SHAPE = GPTConfig(n_layer=6, n_embd=128)  # 1.2 million parameters


def seconds_of_steps(name):
    x = torch.randint(256, (2 * peers.PIECES, 64), device=device())

    def calls(way):
        model, step = way(name, SHAPE)
        return lambda: (model.zero_grad(), step(x, x))

    ways = {"ours": peers.ours, "torch": peers.torch_pipelining}
    return in_turns({way: calls(made) for way, made in ways.items()}, ROUNDS)


def main():
    print(f"forward and backward of a GPT with 1.2 million parameters, {peers.PIECES} micro-batches"
          f", {RANKS} ranks, median of {ROUNDS}; and the median ratio in the same round")
    for name in ("1f1b", "interleaved"):
        seconds = launch(seconds_of_steps, name, ranks=RANKS, timeout=300)[0]
        ms = [1000 * statistics.median(seconds[way]) for way in ("ours", "torch")]
        ratio = statistics.median(a / b for a, b in zip(seconds["ours"], seconds["torch"]))
        print(f"    {name:12} ours {ms[0]:6.1f} ms   torch {ms[1]:6.1f} ms   {ratio:5.2f}")
    print("aim: ours within 1.15 of torch")


if __name__ == "__main__":
    main()
