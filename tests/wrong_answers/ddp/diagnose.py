from statistics import mean

from mutants import mutant

from ranklab.ddp import diagnose as answer

MEDIAN = "median(measure(step) for step in rank_steps) for"
DURATION = "max(medians(lambda step: max(e.end for e in step) - min(e.start for e in step)))"
OTHERS = "(sum(working) - max(working)) / max(len(working) - 1, 1)"
VERDICT = "verdict if shares[verdict] >= 0.25"
TOTAL = "sum(e.end - e.start for e in step if e.kind == '{}')"
WRONG = [
    mutant(answer, "min(exposed)", "max(exposed)", says="Ranks that are ready early only wait"),
    mutant(answer, "medians(exposed_communication)",
           f"medians(lambda step: {TOTAL.format('communication')})",
           says="what no computing hides"),
    mutant(answer, "medians(exposed_communication)",
           f"medians(lambda step: {TOTAL.format('wait')})",
           says="something else: gaps of the main thread"),
    mutant(answer, 'exposed_communication(step, kind="loader")', TOTAL.format("loader"),
           says="loading that no computing hides"),
    mutant(answer, VERDICT, "verdict if shares[verdict] > 0.25", says="from a quarter on"),
    mutant(answer, VERDICT, "verdict if round(shares[verdict], 2) >= 0.25",
           says="the verdict is communication-bound, not healthy"),
    mutant(answer, "max(shares, key=shares.get)", "([x for x in shares if shares[x] >= 0.25] or "
           "[max(shares, key=shares.get)])[0]", says="the verdict is the largest of them"),
    mutant(answer, MEDIAN, "mean([measure(step) for step in rank_steps]) for", mean=mean,
           says="the median step of each"),
    mutant(answer, DURATION, "1.0", "shares[verdict] >= 0.25", "shares[verdict] >= 0.015",
           says="loader-bound is in seconds"),
    mutant(answer, "duration = max(medians(lambda step: max(e.end for e in step)",
           "duration = max((lambda step: max(e.end for e in step)", "in step)))",
           "in step))(events) for events in timelines)", says="is a share of all steps"),
    mutant(answer, "duration = ", "duration = 0.01 * ", "0.25", "25",
           says="loader-bound is per cent"),
    mutant(answer, "[a + b for", "[a for", says="A rank works when it computes or loads"),
    mutant(answer, OTHERS, "mean([w for w in working if w < max(working)] or [max(working)])",
           mean=mean, says=r"two of three ranks are slow.*the mean of the \*other\* ranks"),
    mutant(answer, OTHERS, "mean([w for w in working if w < max(working)])", mean=mean,
           says="Ranks may be equally busy"),
    mutant(answer, "max(len(working) - 1, 1)", "(len(working) - 1)",
           says="With one rank there are no others"),
    mutant(answer, '(verdict if shares[verdict] >= 0.25 else "healthy"), shares', "verdict",
           says="a verdict and its shares"),
    mutant(answer, "raise ValueError(", 'return "healthy", dict.fromkeys(("loader-bound", '
           '"communication-bound", "straggler"), 0.0), (',
           says="no timeline raises no error.*Keep the first lines of the stub"),
]
