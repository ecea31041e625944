"""Print the step times of 3D parallelism: ours and torch's; a part of `make bench`.

Both train one GPT, on the same ranks, in turns: a busy moment hits both. Nothing is asserted.
"""
import os
import statistics
import time

from ranklab import launch
from ranklab.data import python_text
from ranklab.hybrid import parse_layout
from ranklab.projects.clock import wait_for_all
from ranklab.projects.hybrid import peers

LAYOUTS, ROUNDS, WARM_UP = ("2x2x2", "2x2x2,sp,full", "1x2x2", "2x1x2,virtual=2"), 10, 2


def seconds_of_steps(text, layout):
    """{way: seconds of each step, until the slowest rank is done}, in rounds of one step each."""
    trainers = {"ours": peers.new_trainer(text, peers.ours, layout),
                "torch": peers.new_trainer(text, peers.TorchHybrid, layout)}
    names, seconds = list(trainers), {name: [] for name in trainers}
    for number in range(WARM_UP + ROUNDS):
        names = names[::-1]  # what comes first finds colder caches
        for name in names:
            wait_for_all()
            started = time.perf_counter()
            trainers[name].step()
            wait_for_all()
            if number >= WARM_UP:
                seconds[name].append(time.perf_counter() - started)
    return seconds


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
