"""Print the step times of 3D parallelism: ours and torch's; a part of `make bench`.

Both train one GPT, on the same ranks, in turns: a busy moment hits both. Nothing is asserted.
"""
import os
import statistics

from ranklab import device, launch
from ranklab.data import python_text
from ranklab.hybrid import Hybrid, parse_layout
from ranklab.peers.torch_hybrid import TorchHybrid
from ranklab.projects.clock import in_turns
from ranklab.projects.hybrid.config import LAPTOP, Config
from ranklab.projects.training import new_model
from ranklab.trainer.text import TextTrainer

LAYOUTS, ROUNDS, WARM_UP = ("2x2x2", "2x2x2,sp,full", "1x2x2", "2x1x2,virtual=2"), 10, 2


def seconds_of_steps(text, layout):
    parallels = {"ours": Hybrid(layout.new_mesh(), layout), "torch": TorchHybrid(layout)}
    return in_turns({name: TextTrainer(new_model(LAPTOP), text, Config(), device(), progress=False,
                                       parallel=parallel).step
                     for name, parallel in parallels.items()}, ROUNDS, WARM_UP)


def main():
    print(f"a step of a GPT over data x tensor x pipeline ranks, median of {ROUNDS}; and the "
          "median ratio in the same round")
    text = python_text()
    for layout in map(parse_layout, LAYOUTS):
        seconds = launch(seconds_of_steps, text, layout, ranks=layout.ranks, timeout=300)[0]
        ms = {name: 1000 * statistics.median(each) for name, each in seconds.items()}
        ratio = statistics.median(a / b for a, b in zip(seconds["ours"], seconds["torch"]))
        print(f"    {str(layout):34} ours {ms['ours']:6.0f} ms   torch {ms['torch']:6.0f} ms   "
              f"{ratio:5.2f}   load {os.getloadavg()[0]:.0f}", flush=True)
    print("aim: ours not slower than torch")


if __name__ == "__main__":
    main()
