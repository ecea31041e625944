"""PackedStream: each step's windows against one long text, while the number of ranks changes."""

import json
import random
from collections import Counter
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch

from ranklab.checks.prover import AtMost, Must, Proof, Slip, Stage, Told
from ranklab.engine.report import count_ranks
from ranklab.resilience.stream import Documents, PackedStream

STATE_BYTES = 100
MANY = (7, 0, 31, 12, 3, 18, 1, 25, 9, 14, 0, 40, 5, 22, 11, 2, 16, 8, 27, 6)  # 257 tokens
FEW = (5, 3, 6)  # fewer tokens than a window: it holds more than two epochs
FORM, SAME, LEFT_ALONE = "a 2-D int64 tensor", "the same on all ranks", "as before"
ROWS, SHARES, KIND, READ = ("what all ranks get in", "the difference of shares",
                            "what next() returns", "documents read for")
STATE, STATES, BYTES, RANDOM = ("what JSON makes of the state", "the state of the ranks",
                                "the bytes of the state", "the libraries' random states")


class Life(NamedTuple):
    """Steps on a number of ranks. `before`: steps that its streams do before they load."""

    ranks: int
    steps: int
    before: int = 0


class Run(NamedTuple):
    """Lives, each of which continues from the state of the previous one."""

    lives: tuple
    lengths: tuple = MANY
    window: int = 10
    batch: int = 5
    seed: int = 0

    def __str__(self):
        first, *rest = self.lives
        lives = [f"{first.steps} steps on {count_ranks(first.ranks)}",
                 *(f"{life.steps} on {life.ranks}" for life in rest)]
        return f"batch {self.batch}, seed {self.seed}, {', then '.join(lives)}"

    def documents(self):
        """Return Documents in which each token is a different number."""
        ends = [0, *accumulate(self.lengths)]
        return Documents([torch.arange(*pair) for pair in pairwise(ends)])


def _see(fn, run):
    before = _random_states()
    torch.manual_seed(4321)  # so that who draws from these shows the same every time
    np.random.seed(4321)
    random.seed(4321)
    try:
        yield from _lives(fn, run)
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(torch.tensor(before[2], dtype=torch.uint8))


def _lives(fn, run):
    state, step = None, 0
    for life in run.lives:
        owned = [run.documents() for _ in range(life.ranks)]
        before = _random_states()
        streams = [fn(documents, run.window, run.batch, seed=run.seed, rank=rank, ranks=life.ranks)
                   for rank, documents in enumerate(owned)]
        for _ in range(life.before):
            [stream.next() for stream in streams]
        for documents in owned:
            documents.read.clear()
        if state is not None:
            [stream.load_state_dict(json.loads(state)) for stream in streams]
        for _ in range(life.steps):
            parts = [stream.next() for stream in streams]
            states = [_text(stream.state_dict()) for stream in streams]
            state = states[0]
            yield _windows(parts, run, step, life) | {
                f"{READ} step {step}": _read(owned, run, step),
                STATE: Must("a text" if None not in states else "an error", "a text"),
                STATES: Must(SAME if len({*states}) == 1 else "not the same", SAME),
                BYTES: AtMost(max(len(text or "") for text in states), STATE_BYTES),
                RANDOM: Must(LEFT_ALONE if _random_states() == before else "moved", LEFT_ALONE)}
            step += 1


def _windows(parts, run, step, life):
    """Return {name: value} of the ranks' windows in a step."""
    kinds = {FORM if isinstance(part, torch.Tensor) and part.dim() == 2
             and part.dtype == torch.int64 else _kind(part) for part in parts}
    rows = sorted(row for part in parts for row in _rows(part))
    sizes = [len(_rows(part)) for part in parts]
    return {f"{ROWS} step {step}": Told(rows, _in_words(_of_this_epoch(run, step))),
            KIND: Must(" and ".join(sorted(kinds)), FORM),
            SHARES: AtMost(max(sizes) - min(sizes), 1,
                           f"the ranks have {sizes} windows, which differ by {{:g}}, not by at "
                           f"most {{:g}}")}


def _kind(part):
    if not isinstance(part, torch.Tensor):
        return f"a {type(part).__name__}"
    return f"a {part.dim()}-D {str(part.dtype).removeprefix('torch.')} tensor"


def _rows(part):
    try:
        return [[int(token) for token in row] for row in part]
    except (TypeError, ValueError):
        return []


def _in_words(earlier):
    """Return a function that says which tokens a step lacks, and which it should not have."""
    def tell(got, due):
        got, due = (Counter(token for row in rows for token in row) for rows in (got, due))
        lost, more = (sorted((x - y).elements()) for x, y in ((due, got), (got, due)))
        if not lost and not more:
            return "the right tokens, but cut or joined in another way"
        again = [token for token in more if token in earlier]
        return f"different tokens: {_some(lost)} are missing, {_some(more)} should not be there" + (
            f", of which {len(again)} have already come in this epoch" * bool(again))

    return tell


def _of_this_epoch(run, step):
    """Return the tokens between the beginning of the epoch and that of the step."""
    epoch, offset = divmod(step * run.batch * run.window, sum(run.lengths))
    ends = [0, *accumulate(run.lengths)]
    text = [token for i in _order(run, epoch) for token in range(ends[i], ends[i + 1])]
    return {*text[:offset]}


def _some(tokens):
    text = ", ".join(map(str, tokens[:4])) + ", ..." * (len(tokens) > 4)
    return f"{len(tokens)} ({text})" if tokens else "0"


def _read(owned, run, step):
    """Return how many documents all ranks read since the last step, and how many suffice."""
    count = sum(len(documents.read) for documents in owned)
    for documents in owned:
        documents.read.clear()
    return AtMost(count, sum(_needed(run, number) for number in range(
        step * run.batch, (step + 1) * run.batch)), "{:g} documents are read; {:g} are enough")


def _needed(run, number):
    """Return how many documents a window spans."""
    total, places = sum(run.lengths), range(number * run.window, (number + 1) * run.window)
    owners = []
    for place in places:
        epoch, offset = divmod(place, total)
        ends = accumulate(run.lengths[i] for i in _order(run, epoch))
        owner = epoch, next(i for i, end in enumerate(ends) if end > offset)
        if owner not in owners:
            owners.append(owner)
    return len(owners)


def _order(run, epoch):
    generator = torch.Generator().manual_seed(run.seed + epoch)
    return torch.randperm(len(run.lengths), generator=generator).tolist()


def _text(state):
    try:
        return json.dumps(state)
    except (TypeError, ValueError):
        return None


def _random_states():
    numpys = np.random.get_state()
    return (random.getstate(), (numpys[0], numpys[1].tolist(), *numpys[2:]),
            torch.get_rng_state().tolist())


class OneLongText:
    """Join all documents needed so far, and cut them: correct, and far too expensive."""

    def __init__(self, documents, window, batch, seed=0, rank=0, ranks=1):
        self.documents, self.window, self.batch, self.seed = documents, window, batch, seed
        self.rank, self.ranks, self.step = rank, ranks, 0

    def next(self):
        stop, epoch, text = (self.step + 1) * self.batch * self.window, 0, []
        while len(text) < stop:
            random = torch.Generator().manual_seed(self.seed + epoch)
            for number in torch.randperm(len(self.documents), generator=random).tolist():
                text += self.documents[number].tolist()
            epoch += 1
        rows = torch.tensor(text[:stop]).view(-1, self.window)[self.step * self.batch:]
        self.step += 1
        return rows[self.rank::self.ranks]

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


# --- mistakes -------------------------------------------------------------------------------------

SEED, DRAWN = "(self.seed + epoch)", "generator=random"
STEP, BACK = '{"step": self.step}', 'self.step = state["step"]'
ROWS_OF, FIRST = "shard_range(self.batch, self.rank, self.ranks)", "self.step * self.batch"
AT = "at, stop, pieces = number * self.window, (number + 1) * self.window, []"
EPOCH, CACHED = "divmod(at, self.total)", "if epoch not in self.cached:"
CUT = "[offset - ends[place]:][:stop - at]"
PER_EPOCH = "(self.total // self.window or 1)"


class Buffered:
    """A stream like a buffered generator: the buffer is not saved, and all read everything."""

    def __init__(self, documents, window, batch, seed=0, rank=0, ranks=1):
        self.documents, self.window, self.batch, self.seed = documents, window, batch, seed
        self.rank, self.ranks, self.number, self.buffer = rank, ranks, 0, []

    def next(self):
        rows = []
        while len(rows) < self.batch:
            while len(self.buffer) < self.window:
                epoch, place = divmod(self.number, len(self.documents))
                random = torch.Generator().manual_seed(self.seed + epoch)
                order = torch.randperm(len(self.documents), generator=random).tolist()
                self.buffer += self.documents[order[place]].tolist()
                self.number += 1
            rows.append(self.buffer[:self.window])
            self.buffer = self.buffer[self.window:]
        return torch.tensor(rows)[self.rank::self.ranks]

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number, self.buffer = state["number"], []


LIVES = tuple(Life(*each) for each in ((4, 3), (3, 2), (5, 4), (1, 2, 7), (2, 5, 1)))
RUNS = (Run((Life(4, 14),)), Run((Life(3, 6),), seed=7, batch=3, window=13),
        Run((Life(2, 4),), FEW, 33, 2, 3))
RESUMED = (Run(LIVES), Run(LIVES, seed=3, batch=7, window=13),
           Run((Life(2, 2), Life(3, 3, 2)), FEW, 33, 3, 3))
WINDOWS = tuple(f"{ROWS} step {step}" for step in range(20))
READS = tuple(f"{READ} step {step}" for step in range(20))
STREAM = Proof(
    PackedStream,
    Stage({"each step has its windows; in every epoch each token comes once, in another order":
           WINDOWS,
           "all ranks have shares, which differ by at most one window": (SHARES, KIND),
           "a rank reads only documents that its windows need": READS,
           "the state is small, and the same on all ranks; random numbers are left alone":
           (STATE, STATES, BYTES, RANDOM)},
          _see, RUNS, oracle=OneLongText),
    Stage({"4, 3, 5, 1 and 2 ranks continue from each other's state: no token is lost, none comes "
           "twice": WINDOWS,
           "a resume reads nothing again": READS,
           "the next state is right as well": (STATE, STATES, BYTES, RANDOM, SHARES, KIND)},
          _see, RESUMED, oracle=OneLongText,
          note=("Without interruptions it was right. Here the number of ranks changes, and a "
                "stream that has already advanced is restored.")),
    mistakes=(
        # the stream
        Slip("Each epoch has its own order, shuffled with seed + epoch: here an earlier epoch's "
             "order is repeated.", (SEED, "(self.seed)"),
             (CACHED, "if not self.cached:", "self.cached = {epoch: (order, ends)}\n        return "
              "self.cached[epoch]",
              "self.cached = {0: (order, ends)}\n        return self.cached[0]")),
        Slip("A different seed must give a different order: seed the shuffle with seed + epoch.",
             (SEED, "(epoch)")),
        Slip("All ranks share one stream: the shuffle must not depend on the rank.",
             (SEED, "(self.seed + epoch + self.rank)")),
        Slip("The global random state is different on each rank and after each restart: give "
             "torch.randperm its own torch.Generator.", (f", {DRAWN}", "")),
        Slip("torch.manual_seed also resets the random numbers for dropout: use your own "
             "torch.Generator.",
             ("torch.Generator().manual_seed", "torch.manual_seed")),
        Slip("The documents must be shuffled.",
             (f"torch.randperm(len(self.documents), {DRAWN}).tolist()",
              "[*range(len(self.documents))]")),
        Slip("The end of an epoch, less than a window, is lost: let the window continue into the "
             "next epoch.",
             (AT, f"epoch, number = divmod(number, {PER_EPOCH})\n        "
              f"{AT.replace('number * ', 'epoch * self.total + number * ')}\n        "
              "stop = at + self.window")),
        Slip("A window that crosses the end of an epoch continues in the next epoch's order.",
             (EPOCH, "(number * self.window // self.total, at % self.total)")),
        Slip("Windows do not overlap: window k begins at token k * window.",
             (AT, AT.replace("* self.window", "* (self.window - 1)").replace(
                 "(number + 1) * (self.window - 1)", "number * (self.window - 1) + self.window"))),
        Slip("Cut a document where the window ends; the rest belongs to the next window.",
             (CUT, "[offset - ends[place]:]")),
        Slip("Begin inside the document, where the previous window ended.",
             (CUT, "[:stop - at]")),
        # who has which windows
        Slip("Here every rank has all windows. Each should take its share: use lab 00's "
             "shard_range.",
             (ROWS_OF, "range(self.batch)")),
        Slip("`batch` counts the windows of all ranks together, so that a step is the same for any "
             "number of ranks.",
             (ROWS_OF, "range(self.rank * self.batch, (self.rank + 1) * self.batch)",
              FIRST, f"{FIRST} * self.ranks")),
        Slip("If the ranks do not divide the batch, the first ones take one more window each: "
             "otherwise windows are lost.",
             (ROWS_OF, "[self.rank + self.ranks * i for i in range(self.batch // self.ranks)]")),
        Slip("The ranks' shares must differ by at most one window: all wait for the fullest rank.",
             (ROWS_OF, "range(self.rank, self.rank + 1) if self.rank < self.ranks - 1 else "
              "range(self.rank, self.batch)")),
        Slip("Return one tensor of shape (windows, window): use torch.stack.",
             ("torch.stack([self._window(first + row) for row in rows])",
              "[self._window(first + row) for row in rows]")),
        # the state
        Slip("This counts one rank's windows, which mean a different position for another number "
             "of ranks. Save what is true of the whole run: the step.",
             (STEP, f'{{"windows": self.step * (self.batch // self.ranks or 1)}}',
              BACK, 'self.step = state["windows"] * self.ranks // self.batch')),
        Slip("The ranks' states differ here, but a new rank has no state of its own. Save only "
             "what is the same on all ranks.",
             (STEP, '{"rank": self.rank, "step": self.step}'),
             (STEP, '{str(self.rank): self.step}', BACK,
              'self.step = state.get(str(self.rank), 0)')),
        Slip("Each rank reads the documents of all ranks here. A window's position follows from "
             "its number: read only the documents of your own windows.", Buffered),
        Slip("This begins the epoch again: the position inside the epoch is part of the state.",
             (BACK, 'self.step = state["step"] * self.batch * self.window // self.total * '
              'self.total // (self.batch * self.window)')),
        Slip("This starts from the beginning again: load_state_dict must set the position.",
             (BACK, "pass")),
        Slip("This repeats the last step: save the number of the next one.",
             (STEP, '{"step": self.step - 1}')),
        Slip("This skips a step: save the number of the next one.",
             (STEP, '{"step": self.step + 1}')),
        Slip("Set the position instead of adding to it: this stream may already have advanced.",
             (BACK, 'self.step += state["step"]')),
        Slip("json.dumps can't write this state: save plain ints.",
             (STEP, '{"step": torch.tensor(self.step)}')),
        Slip("The state grows with the data. The order follows from seed and epoch, so it need not "
             "be saved.",
             (STEP, '{"step": self.step, "order": self._epoch(self.step * self.batch * '
              'self.window // self.total)[0] * 9}')),
        Slip("Saving must change nothing: state_dict() can be called at any time.",
             ("        return " + STEP, f"        state = {STEP}\n        self.step += 1\n"
              "        return state")),
        # what is read
        Slip("A resume must not read old documents again: jump to the position instead of "
             "repeating the steps.",
             (BACK, 'self.step = 0\n        for _ in range(state["step"]):\n            '
              'self.next()')),
        Slip("This reads all documents. Their lengths are known without reading: use their ends to "
             "find a window's documents, and read only those.",
             ("            ends =", "            [self.documents[i] for i in order]\n"
              "            ends =")),
    ), hints=(
        "Number the windows of all epochs: 0, 1, 2, ... Which tokens of the endless stream are in "
        "window k? Does any of this depend on the number of ranks?",
        "Save only the step. Step s has windows s * batch to (s + 1) * batch, and each rank takes "
        "its shard_range of them. A position in the stream is (epoch, offset) = divmod(position, "
        "tokens per epoch), and the documents' ends in that epoch's order tell which document it "
        "is in.",
        "ends = list(itertools.accumulate(lengths in the epoch's order)); i = "
        "bisect.bisect_right(ends, offset); documents[order[i]][offset - ends[i]:][:tokens that "
        "the window still needs]; and again, until the window is full",
    ))
