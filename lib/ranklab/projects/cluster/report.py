"""What the cluster has been through, as text."""

import textwrap

from ranklab.cluster import hosts, slurm
from ranklab.projects.cluster.config import GPUS, NODES, PARTS, SPARE, Links
from ranklab.projects.cluster.links import try_links
from ranklab.projects.cluster.node_loss import lose_a_node
from ranklab.projects.runner import Shown


def act(options, _):
    """The parts that were asked for have run, or a sentence says why they can't."""
    parts, lines, good = PARTS if options.only is None else (options.only,), [], True
    if "job" in parts:
        found, sentence = None, slurm.missing()
        if not sentence:
            with hosts.Hosts(NODES + SPARE) as machines:  # what watches the job may go here
                cluster = slurm.Slurm(machines, GPUS)
                found, sentence = lose_a_node(cluster), cluster.no_sacct
        lines += [*told(found, sentence), ""]
        good = good and (found is None or found.is_good())
    if "links" in parts:
        sentence = hosts.missing()
        found = None if sentence else try_links(Links())
        lines += linked(found, Links()) if found else [f"links: not run; {sentence}"]
        good = good and (found is None or len(found.missing()) == 1)
    return Shown("\n".join(lines).strip(), code=int(not good))


def told(found, no_sacct):
    """Lines about the job that lost a node."""
    if found is None:
        return [f"Slurm: not run; {no_sacct}"]
    return [
        f"job {found.job} on {' and '.join(found.nodes)}, {GPUS} ranks on each",
        f"{found.lost} lost its power; the last whole checkpoint is of step {found.step}",
        f"after {found.down_after:4.1f} s Slurm calls it DOWN: {found.reason}",
        f"after {found.again_after:4.1f} s the job starts again, on "
        f"{' and '.join(found.nodes_after)}; it does {found.steps_after} steps, to step "
        f"{found.steps}",
        *(f"    sacct: {row['State']:10} {row['NodeList']:12} {row['Elapsed']}"
          for row in found.rows), *([no_sacct] if no_sacct else []),
        f"held out: {found.loss:.4f} nats; a run that nothing disturbs: {found.usual_loss:.4f}",
        "its last checkpoint is the undisturbed run's, bit for bit, in "
        f"{found.tensors} tensors" if not found.differ else
        f"its last checkpoint DIFFERS from the undisturbed run's in {len(found.differ)} of "
        f"{found.tensors} tensors"]


def linked(found, links):
    """Lines about the links between hosts."""
    lines = [
        f"all-reduce of {links.nbytes >> 20} MiB, two hosts of two ranks, {links.mbit} Mbit/s:",
        f"{1e3 * found.flat:7.0f} ms  flat ring, each hop from host to host",
        f"{1e3 * found.hierarchical:7.0f} ms  hierarchical",
        f"{found.flat / found.hierarchical:7.1f} x   by the bytes that cross: "
        f"{found.formula:.1f} x",
        f"the link is gone for {links.flap:.0f} s: one step takes {found.flapped:.1f} s, and it "
        f"goes on ({1e3 * found.step:.0f} ms a step before, {1e3 * found.after:.0f} ms after)",
        f"the link is cut, and the group waits {found.limit:.0f} s:"]
    for each in found.failures:
        error = textwrap.shorten(each["error"].rpartition("] ")[2], 30, placeholder="...")
        lines.append(f"    rank {each['rank']} on {each['host']}: {each['seconds']:.1f} s, "
                     f"{error}; no answer from {' and '.join(each['silent'])}")
    return [*lines, f"missing, for those that reach {hosts.CONTROLLER}: "
                    f"{' '.join(found.missing())}"]
