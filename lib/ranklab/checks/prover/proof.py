"""The check: stages in order; then the mistake that explains the first difference."""

import sys

from ranklab.checks.exercise import Exercise, Mistake
from ranklab.checks.failures import is_slip
from ranklab.checks.library_guard import LibrarysAnswer
from ranklab.checks.prover import digest, tables
from ranklab.checks.prover.compare import Raised, differences, value_at
from ranklab.checks.prover.facts import fact
from ranklab.checks.prover.observe import observe, unpacked
from ranklab.checks.prover.slips import edited

LIKE = "A mistake that shows just this: "  # all that is seen is an error, or few numbers or words
_RIGHT = {}  # (Stage, number of ranks): what is right there, packed


class Difference:
    """What is wrong in one launch: `broken`, a Mistake; or what was seen beside what is right.

    apart  {(step, name): ranks}, in the order in which they are told
    """

    def __init__(self, broken=None, results=(), right=(), apart=None):
        self.broken, self.seen, self.right, self.apart = broken, results, right, apart or {}


class Proof(Exercise):
    """An exercise whose check is its stages, and whose hints are its mistakes.

    mistakes  Slips: whoever shows the same as one of them gets its sentence
    """

    def __init__(self, answer, *stages, mistakes, hints):
        super().__init__(answer, self.prove, hints)
        module = sys._getframe(1).f_globals["__name__"]
        for name, value in (("stages", stages), ("mistakes", mistakes), ("_module", module)):
            object.__setattr__(self, name, value)

    @property
    def module(self):
        return self._module

    def prove(self, fn):
        for stage, ranks, is_last in self.launches():
            if difference := self.difference(stage, ranks, fn):
                first = min((stage.place(name) for _, name in difference.apart), default=0)
                yield from stage.sentences[:first]
                raise self.named(stage, ranks, difference)
            if is_last:
                yield from stage.sentences

    def launches(self):
        """Yield (Stage, number of ranks, is it the stage's last)."""
        for stage in self.stages:
            for ranks in stage.ranks or (0,):
                yield stage, ranks, ranks == (stage.ranks or (0,))[-1]

    def key(self, stage, ranks):
        """Return the name of a launch in the table."""
        return f"stage {self.stages.index(stage)}, {ranks or 'no'} ranks"

    def plain_answer(self):
        """Return the library's answer as a learner would write it down."""
        return edited(self.answer)

    def difference(self, stage, ranks, fn):
        """Return the Difference, or None.

        What breaks runs once more: did anything differ before?
        """
        broken = None
        for stops in (False, True):
            try:
                right, results = observe(stage, ranks, self.plain_answer(), fn,
                                         _RIGHT.get((stage, ranks)), stops)
            except LibrarysAnswer:
                raise
            except Mistake as mistake:
                broken = broken or mistake
                continue
            _RIGHT[stage, ranks] = right
            if results is None:
                break
            right = unpacked(right)
            if any(each.error and each.error.kind == LibrarysAnswer.__name__
                   for of_rank in results for each in of_rank.values()):
                raise LibrarysAnswer(self.name)
            if apart := differences(stage, results, right):
                return Difference(None, results, right, apart)
            break
        return broken and Difference(broken)

    def errors_of_what_is_right(self, stage, ranks):
        """Return what is right to raise there, but for ValueErrors: perhaps the check's mistake."""
        return [each.error.headline for of_rank in unpacked(_RIGHT[stage, ranks])
                for each in of_rank.values() if each.error and each.error.kind != "ValueError"]

    def named(self, stage, ranks, difference):
        """Return the Mistake: facts, and the sentence of the mistake that shows the very same."""
        if broken := difference.broken:
            if broken.case is not None:
                broken.what = f"{stage.case_name(broken.case)}: {broken.what}"
            broken.hint = self._hint(stage, ranks, difference, broken.hint)
            return broken
        (step, name), (rank, *_) = next(iter(difference.apart.items()))
        got = value_at(difference.seen[rank], step, name)
        due = difference.right[rank][step].values[name]
        is_error = isinstance(got, Raised) and not isinstance(due, Raised)
        return Mistake(fact(stage, difference.seen, difference.right, step, name, rank),
                       self._hint(stage, ranks, difference), got.headline if is_error else "")

    def _hint(self, stage, ranks, difference, otherwise=""):
        if difference.broken and is_slip(difference.broken.cause):
            return ""
        return self.proved(stage, ranks, difference) or otherwise or stage.note

    def proved(self, stage, ranks, difference):
        """Return the sentence of the mistake that explains most of the difference.

        "" if none does, or several: then nothing is proved.
        """
        target = digest.of_difference(difference)
        scores = {says: max(digest.explains(each, difference, target, stage) for each in programs)
                  for says, programs in tables.load(self).get(self.key(stage, ranks), {}).items()}
        most = max(scores.values(), default=0)
        best = [says for says, score in scores.items() if score == most > 0]
        if len(best) != 1:
            return ""
        is_little = difference.broken or digest.tells_little(target[1])
        return (LIKE if is_little else "") + best[0]
