"""The ward: programs run under observation; the diagnosis of each, and its actual disease."""

import contextlib
import tempfile
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from unittest import mock

from ranklab.clinic import detectors
from ranklab.clinic.all_cases import CASES
from ranklab.clinic.case import Case
from ranklab.clinic.diagnose import diagnose
from ranklab.clinic.hooks import observation
from ranklab.clinic.trace import read
from ranklab.engine import HangError, RankError, launch

STALL = 2.0  # seconds without any work: a hang
# As the lab shows it, with the same disease elsewhere, and fixed.
FORMS = {"found": Case.broken, "variant": Case.variant, "mended": attrgetter("program")}


@dataclass(frozen=True)
class Visit:
    """The observation of one program.

    disease    its actual disease; "" where it is fixed
    diagnosed  names of diseases
    evidence   for the right diagnosis, or else for the first
    """

    case: str
    form: str
    disease: str
    diagnosed: tuple
    evidence: str

    def is_right(self):
        return (self.disease in self.diagnosed) if self.disease else not self.diagnosed


def observe(program, ranks=4, **settings):
    """Run `program` under observation and return its Ranks, even if it hangs or fails."""
    with tempfile.TemporaryDirectory() as folder:
        # A failure is observed as well: what the ranks did until then was recorded.
        with observation(folder), contextlib.suppress(HangError, RankError):
            launch(lambda: program(**settings) and None, ranks=ranks, stall=STALL)
        launches = sorted({path.parent for path in Path(folder).glob("**/rank*.0.jsonl")})
        return read(launches[-1]) if launches else []


def visit(case, form="found", **replacements):
    """Diagnose a case in one of its FORMS; return a Visit.

    replacements: detectors by name, which replace the library's
    """
    ranks = observe(FORMS[form](case))
    with mock.patch.multiple(detectors, **replacements) if replacements else mock.patch.dict({}):
        diagnoses = diagnose(ranks)
    disease = "" if form == "mended" else case.disease
    evidence_of = {each.disease: each.evidence for each in diagnoses}
    evidence = evidence_of.get(disease) or next(iter(evidence_of.values()), "")
    return Visit(case.name, form, disease, tuple(evidence_of), evidence)


def round_of(form=None, name=None):
    """Visit all cases in all forms, or one case or form; return [Visit, ...]."""
    return [visit(case, each) for case in CASES if name in (None, case.name)
            for each in FORMS if form in (None, each)]


def report(visits):
    """Return the diagnosis of each program as text, and how many were right."""
    lines = []
    for each in visits:
        mark = "ok  " if each.is_right() else "MISS" if each.disease else "FALSE ALARM"
        names = ", ".join(each.diagnosed) or "nothing"
        lines.append(f"{mark} {each.case:20} {each.form:8} {names}")
        if each.evidence:
            lines.append(f"       {each.evidence}")
    sick = [each for each in visits if each.disease]
    well = [each for each in visits if not each.disease]
    lines.append(f"found: {sum(map(Visit.is_right, sick))} of {len(sick)} sick programs; false "
                 f"alarms: {len(well) - sum(map(Visit.is_right, well))} of {len(well)}")
    return "\n".join(lines)
