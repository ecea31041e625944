"""The exercises and predictions of lab 02, in the order of the lab.

    cases.py         inputs, the one trial of all verbs, and what is said of a sum
    traffic.py       what a verb may send
    ring.py          reduce-scatter, all-gather, all-reduce round a ring
    tree.py          few steps: broadcast by doubling, all-reduce by doubling
    groups.py        parameter server and hierarchical all-reduce
    cost.py          the alpha-beta model
    all_to_all_v.py  all_to_all_v
"""

from ranklab import collectives
from ranklab.checks.collectives.all_to_all_v import check_all_to_all_v
from ranklab.checks.collectives.cost import CROSSOVER, FIT, TIME
from ranklab.checks.collectives.groups import check_hierarchical_all_reduce, check_parameter_server
from ranklab.checks.collectives.predictions import PREDICTIONS
from ranklab.checks.collectives.ring import ALL_REDUCE, GATHER, SCATTER
from ranklab.checks.collectives.tree import check_recursive_doubling, check_tree_broadcast
from ranklab.checks.exercise import Exercise

__all__ = ["EXERCISES", "PREDICTIONS"]

EXERCISES = (
    Exercise(collectives.tree_broadcast, check_tree_broadcast, hints=(
        "Count places from src: place = (rank - src) % R. Place 0 has the value at the start.",
        "Keep a number `have`, 1 at first: places 0 .. have-1 have the value. In a round each of "
        "them sends to the place `have` further on, if there is one. Then `have` doubles.",
        "while have < R: if place < have and place + have < R: dist.send(out, group=group, "
        "group_dst=(rank + have) % R); elif have <= place < 2 * have: dist.recv(out, group=group, "
        "group_src=(rank - have) % R); then have *= 2. (Not at all when `out` is empty.)",
    )),
    SCATTER, GATHER, ALL_REDUCE,
    TIME,
    Exercise(collectives.all_to_all_v, check_all_to_all_v, hints=(
        "A rank must receive a piece into a tensor of the right length. Which rank knows that "
        "length?",
        "Take two rounds of messages. First each rank tells every other rank how much will come, "
        "then the pieces go. In step s of each, send to rank + s and receive from rank - s.",
        "lengths: verbs.all_to_all of a tensor of shape (R, 1), as int64. Then for shift in "
        "range(1, R): sendrecv(pieces[to].contiguous(), to, received[source], source, group), with "
        "to = (rank + shift) % R and source = (rank - shift) % R. sendrecv skips empty tensors. "
        "Copy your own piece.",
    )),
    Exercise(collectives.hierarchical_all_reduce, check_hierarchical_all_reduce, hints=(
        "Three lines: do as much as you can inside the node, before and after you use the slow "
        "link.",
        "Reduce-scatter inside: each rank of the node has one L-th of the node's sum. All-reduce "
        "that across. All-gather inside.",
        "shard = ring_reduce_scatter(x, inside); shard = ring_all_reduce(shard, across); return "
        "ring_all_gather(shard, inside, out=x.new_empty(x.shape))",
    )),
    Exercise(collectives.parameter_server, check_parameter_server, hints=(
        "There are two kinds of ranks. Workers send x and wait for the answer; the server adds.",
        "The server receives from every worker in turn and adds, and only then sends to every one.",
        "if rank != server: send(total), recv(total), both with group=group and group_dst or "
        "group_src=server; else: for each worker: recv(buffer); "
        "total += buffer; then for each worker: send(total). An empty x is not sent at all.",
    )),
    Exercise(collectives.recursive_doubling, check_recursive_doubling, hints=(
        "In round k swap all you have with the rank whose number differs in bit k: rank ^ 2**k.",
        "When R is no power of two: the ranks from `power` on first give their x to rank - power, "
        "wait, and get the sum at the end. sendrecv with an empty tensor is a one-way message.",
        "step = 1; while step < power: total += sendrecv(total, rank ^ step, buffer, rank ^ step, "
        "group); step *= 2 - with the extra ranks handled before and after.",
    )),
    FIT,
    CROSSOVER,
)
