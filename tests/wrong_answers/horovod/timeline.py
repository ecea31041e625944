from mutants import mutant

from ranklab.horovod import timeline as answer

DUMP = 'json.dump({"traceEvents": trace}, file)'
EACH = "for tensor, phase, start, end in events"
WRONG = [
    mutant(answer, "start * 1e6", "start * 1e3", "(end - start) * 1e6", "(end - start) * 1e3",
           says="The format counts microseconds"),
    mutant(answer, "(end - start)", "end", says="how long it takes, end - start"),
    mutant(answer, EACH, "for phase, tensor, start, end in events", says="A row is a tensor"),
    mutant(answer, '"process_name"', "tensor", says="a row has no name"),
    mutant(answer, DUMP, 'file.write(str({"traceEvents": trace}))',
           says=r"str\(\) of a dict is Python"),
    mutant(answer, DUMP, """file.write(str({"traceEvents": trace}).replace("'", '"'))""",
           says="json.dump.+writes quotes, commas and escapes"),
    mutant(answer, "not in rows", "not in ()", "len(rows) + 1", "len(trace)",
           says="A tensor keeps its row"),
    mutant(answer, '"process_name", "pid": rows[tensor], "tid": 0',
           '"process_name", "pid": 0, "tid": rows[tensor]', 'phase, "pid": rows[tensor], "tid": 0',
           'phase, "pid": 0, "tid": rows[tensor]', says="one row has two names"),
    mutant(answer, EACH, "for (tensor, phase), (start, end) in {(tensor, phase): times "
           "for tensor, phase, *times in events}.items()",
           says="A phase comes again in every step"),
    mutant(answer, EACH, f"{EACH} * 2", says="Write every event once"),
    mutant(answer, '"name": phase', '"name": tensor', says="is its phase"),
    mutant(answer, '"w"', '"a"', says="starts afresh"),
    mutant(answer, "rows, trace = {}, []", "rows, trace = ROWS, []", ROWS={},
           says="called again: a row has no name.+kept from call to call"),
]
