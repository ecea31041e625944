"""The check of read_nccl_log: logs that it writes itself, as NCCL would, and captured ones.

The lines of all processes are mixed, with other text between them; their forms are those of
ranklab.cluster.nccl_log.
"""

import random

from ranklab.checks.beside import expect
from ranklab.checks.exercise import Exercise, Mistake
from ranklab.cluster.nccl_log import NcclLog, read_log, read_nccl_log


def written(hosts, local, rings, network="IB", inside="P2P/CUMEM", gdr="/GDRDMA", silent=(),
            warns=(), seed=0):  # fmt: skip
    """(text, its NcclLog): what the ranks of a job print.

    local   ranks of a host; pids are the same on all hosts
    silent  hosts whose lines are lost
    warns   ((rank, text), ...), which come last
    """
    host = {rank: hosts[rank // local] for rank in sorted(rings[0])}
    own = {rank: [f"Using network {network}", f"comm 0x7f{rank:04x}d0 rank {rank} nRanks "
                  f"{len(host)} cudaDev {rank % local} - Init START"]
           for rank in host if host[rank] not in silent}
    trees, links = {}, {}
    for channel, ring in rings.items():
        listed = f"Channel {channel:02d}/{len(rings):02d} :" + "".join(
            f" {each:{len(str(len(host) - 1))}d}" for each in ring)
        if 0 in own:
            own[0].append(listed if len(listed) < 128 else listed[:124] + "...")
        parent = {rank: ring[(at - 1) // 2] if at else -1 for at, rank in enumerate(ring)}
        trees[channel] = {rank: parent[rank] for rank in own}
        up = [(rank, parent[rank]) for rank in ring[1:]]
        for link in dict.fromkeys([*zip(ring, ring[1:] + ring[:1]), *up,
                                   *((b, a) for a, b in up)]):  # those of the ring come first
            _opened(own, links, (channel, *link), host, local, (network, inside, gdr))
    for rank in own:
        own[rank].append("Trees" + "".join(
            f" [{channel}] {_children(rings[channel], rank)}->{rank}->{of[rank]}"
            for channel, of in trees.items()))
    told = {name: tuple(rank for rank in own if host[rank] == name) for name in hosts}
    log = NcclLog(network, told, {} if silent else rings, trees, links,
                  tuple(dict.fromkeys(warns)))
    return _mixed(own, host, local, warns, random.Random(seed)), log


def _children(ring, rank):
    below = ring[1:][2 * ring.index(rank):][:2]
    return "/".join(map(str, (*below, -1, -1, -1)[:3]))


def _opened(own, links, link, host, local, vias):
    """Both ends of a link print it, and the sender prints more; a lost host prints nothing."""
    (channel, source, target), (network, inside, gdr) = link, vias
    crosses = host[source] != host[target]
    via = f"NET/{network}/{channel}" if crosses else inside
    arrow = (f"Channel {channel:02d}/0 : {source}[{source % local}] -> "
             f"{target}[{target % local}] ")
    if target in own and crosses:
        own[target].append(f"{arrow}[receive] via {via}")
        links[link] = via
    if source in own:
        links[link] = via + gdr * crosses
        own[source].append(f"{arrow}{'[send] ' * crosses}via {links[link]}")


def _mixed(own, host, local, warns, chance):
    def line(rank, text, level="NCCL INFO"):
        gpu = rank % local
        return f"{host[rank]}:{4000 + gpu}:{4100 + gpu} [{gpu}] {level} {text}"

    turns = [rank for rank, texts in own.items() for _ in texts]
    chance.shuffle(turns)
    texts, before = {rank: iter(each) for rank, each in own.items()}, chance.choice(("", "[rank]:"))
    return "\n".join(["NCCL version 2.28.9+cuda12.4", "Epoch 0:  12%|#3   | loss 3.41", "",
                      *(line(rank, "NET/IB : Using [RO]; OOB eth0:10.0.0.7<0>") for rank in own),
                      *(before + line(rank, next(texts[rank])) for rank in turns),
                      *(line(*each, "misc/socket.cc:49 NCCL WARN") for each in warns), ""])


def turning(ranks, local, channels):
    """{channel: ring} of nodes with `local` ranks: a ring runs through a node, then leaves it; in
    each channel it begins elsewhere, in odd ones it goes down.
    """
    found = {}
    for turn in range(channels):
        order = [first + (turn + (-1)**turn * i) % local
                 for first in range(0, ranks, local) for i in range(local)]
        found[turn] = tuple(order[order.index(0):] + order[:order.index(0)])
    return found


HOSTS = tuple(f"gpu-{i:02d}.cluster" for i in range(8))
LOST = "socketProgress: Connection closed by remote peer gpu-00.cluster<43200>"
RUNS = {
    "2 nodes of 4 GPUs, InfiniBand": (HOSTS[:2], 4, turning(8, 4, 4)),
    "3 nodes of 2, sockets": (HOSTS[:3], 2, turning(6, 2, 12), "Socket", "SHM/direct/direct", ""),
    "2 nodes of 4, a plugin": (HOSTS[:2], 4, turning(8, 4, 2), "AWS Libfabric"),
    "8 nodes of 8: ring lists are cut": (HOSTS, 8, turning(64, 8, 3), "IB", "P2P/CUMEM/read"),
    "only the second node's lines": (HOSTS[:2], 4, turning(8, 4, 2), "IB", "P2P/CUMEM", "",
                                     HOSTS[:1]),
    "three warnings": (HOSTS[:2], 2, turning(4, 2, 1), "IB", "P2P/CUMEM", "", (), (
        (3, LOST), (3, LOST), (2, "Cuda failure 'out of memory'"), (3, "Net: other"),
        (1, "Net: other"))),
}
ODD = [(1, "WARN early"), *((rank, f"INFO comm 0x1 rank {rank} nRanks 3") for rank in range(3)),
       *((a, f"INFO Channel 0{channel}/0 : {a}[{a}] -> {b}[{b}] via SHM") for channel, a, b in (
           (0, 0, 1), (0, 1, 2), (1, 0, 1), (1, 1, 0), (1, 2, 0))),  # neither is a ring
       *((0, f"INFO Using network {name}") for name in ("Socket", "IB"))]
CAPTURED = {  # name: what is known of it
    "four_hosts": dict(network="Socket", rings={0: (0, 1, 2, 3), 1: (0, 1, 2, 3)}, warnings=()),
    "forty_hosts": dict(rings={0: tuple(range(40)), 1: tuple(range(40))}, warnings=()),
    "waiting_rank": dict(network="Socket", entered={0: 4, 1: 3, 2: 4}, warnings=()),
    "killed_rank": dict(entered={0: 4, 1: 4, 3: 4}, warnings=tuple(
        (rank, f"socketProgress: Connection closed by remote peer localhost<{port}>")
        for rank, port in ((3, 40194), (3, 43200), (1, 60737)))),
    "no_infiniband": dict(network="", hosts={}, warnings=(
        (None, "Failed to initialize any NET plugin"),)),
    "same_gpu": dict(hosts={"vm": (0, 1)}, rings={}, links={}),
}
HINTS = {  # of each field of NcclLog
    "network": '"Using network" says what is used: all that follows is its name. "NET/IB : Using" '
               "is there even if no device was found.",
    "hosts": "Ranks in order, from each process that tells its rank in a comm line. Its host, pid "
             "and thread come before the text; [0] is a GPU, and pids repeat on other hosts.",
    "rings": "A ring has all ranks, from 0 on, left to right. If the list is cut, take the first "
             "link that each rank opens in the channel; later ones belong to trees.",
    "trees": "Each rank prints its own part of each channel: [0], [1]. Children stand on the left, "
             "1/3/-1, and the parent on the right.",
    "links": 'The key is (channel, from, to), the transport is all that follows "via". On a '
             "network the sender's line counts; if only the receiver printed one, take that.",
    "warnings": "Every NCCL WARN in the log's order, (rank, text), each one once. The rank is that "
                "of its process, by host and pid; None if it is not known.",
    "entered": 'For each rank the number after the last "last enqueued" that torch printed, not '
               'after "last completed".'}


TYPES = {"network": {str}, "hosts": {str, int}, "rings": {int}, "trees": {int},
         "links": {int, str}, "warnings": {int, str, type(None)}, "entered": {int}}


def check_read_nccl_log(read_nccl_log):
    for seed, (name, run) in enumerate(RUNS.items()):
        text, right = written(*run, seed=seed)
        _is(name, read_nccl_log(text), right, HINTS)
        yield f"{name}: hosts, rings, trees, links"
    for name, known in CAPTURED.items():
        _is(f"logs/{name}.txt", read_nccl_log(read_log(name)), NcclLog(**known), known)
        yield f"logs/{name}.txt: {', '.join(known)}"
    text = "\n".join(f"gpu-00:1{rank}:2{rank} [{rank}] NCCL {line}" for rank, line in ODD)
    right = NcclLog("IB", rings={}, warnings=((1, "early"),))
    _is("paths that are no rings", read_nccl_log(text), right, ["network", "rings", "warnings"])
    _is("an empty log", read_nccl_log(""), NcclLog(), HINTS)
    text = "[rank1]:[E1] [PG 0 Rank 1] last enqueued NCCL work: 7, last completed NCCL work: 6.\n"
    _is("torch's line twice", read_nccl_log(text + text.replace("7", "9")),
        NcclLog(entered={1: 9}), ["entered"])
    yield "an empty log; torch's numbers, the last of a rank"


def _is(name, got, right, fields):
    expect(isinstance(got, NcclLog), f"{name}: {got!r:.60} is returned", "Return an NcclLog.")
    for field in fields:
        theirs, known = _plain(getattr(got, field)), _plain(getattr(right, field))
        if theirs == known:
            continue
        if isinstance(known, dict) and isinstance(theirs, dict):  # the first key that differs
            keys = [*(known if field == "trees" else theirs), *known]
            key = next(key for key in keys if theirs.get(key) != known.get(key))
            field_key, theirs, known = f"{field}[{key!r}]", theirs.get(key), known.get(key)
        else:
            key, field_key = None, field
        is_typed = _types(getattr(got, field)) <= TYPES[field]
        raise Mistake(f"{name}: {field_key} is {theirs!r:.150}, not {known!r:.150}", _slip(
            field, key, theirs, known, right) or HINTS[field] * is_typed)


def _slip(field, key, theirs, known, right):
    """A hint if a value proves what went wrong, otherwise ""."""
    if field == "rings" and isinstance(theirs, tuple) and known:
        if len(theirs) < len(known) and theirs == known[:len(theirs)]:
            return ('It is only a part of the ring: a list that NCCL cut ends with "...". Match '
                    "the whole line, and follow the links if it is cut.")
        return "It is turned round." * (theirs[1:] == known[:0:-1])
    if field == "links" and isinstance(key, tuple) and (*key[:1], *key[:0:-1]) in right.links:
        return ("It is turned round: an arrow goes from left to right in [receive] lines, too."
                if key not in right.links else "")
    return ""


def _types(value):
    """Return the types of all numbers and texts in it: a channel as a text is no wrong ring."""
    if isinstance(value, dict):
        return {kind for pair in value.items() for each in pair for kind in _types(each)}
    if isinstance(value, (list, tuple)):
        return {kind for each in value for kind in _types(each)}
    return {type(value)}


def _plain(value):
    """Lists as tuples, and no channels without anything in them."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items() if each not in ({}, (), [])}
    return tuple(map(_plain, value)) if isinstance(value, (list, tuple)) else value


READ_LOG = Exercise(read_nccl_log, check_read_nccl_log, hints=(
    "Each rank prints its own part. Go through all lines, and put together what belongs to a "
    "channel.",
    "A dict of (host, pid) -> rank, one of (channel, from, to) -> transport, and one of "
    "(channel, rank) -> the first rank it opens a link to. A ring list that is "
    "cut does not match RING as a whole.",
    "ring = [0]; while (after := opened.get((channel, ring[-1]))) not in (None, *ring): "
    "ring.append(after)"))
