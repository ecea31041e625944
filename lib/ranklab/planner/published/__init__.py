"""Published measurements, with their sources (README.md), and the one loader that reads them.

A file of runs has a header; cells that are missing, empty or unreadable become None.
"""

import csv
import math
from dataclasses import dataclass, fields
from pathlib import Path

__all__ = ["Run", "read_runs", "run_files", "table"]

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Run:
    """A published run: the columns of runs_*.csv, with their units in the names.

    file        the name of its file without runs_ and .csv: the source by which scores are grouped
    unreadable  names of columns whose cell should be a number but is not
    """

    row_id: str
    file: str = ""
    model: str = ""
    arch_notes: str = ""
    hardware: str = ""
    precision: str = ""
    pp_schedule: str = ""
    sharding: str = ""
    sequence_parallel: str = ""
    recompute: str = ""
    tflops_kind: str = ""
    mem_unit: str = ""
    mem_kind: str = ""
    task: str = ""
    provenance: str = ""
    source: str = ""
    derived_fields: str = ""
    quality: str = ""
    notes: str = ""
    params_b: float | None = None
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    ffn: int | None = None
    vocab: int | None = None
    seq_len: int | None = None
    gpus: int | None = None
    gpus_per_node: int | None = None
    tp: int | None = None
    pp: int | None = None
    vpp: int | None = None
    cp: int | None = None
    ep: int | None = None
    dp: int | None = None
    zero_stage: int | None = None
    micro_batch: int | None = None
    grad_accum: float | None = None
    global_batch_seqs: float | None = None
    iter_time_s: float | None = None
    tokens_per_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    samples_per_s_per_gpu: float | None = None
    tflops_per_gpu: float | None = None
    mfu_pct: float | None = None
    hfu_pct: float | None = None
    peak_tflops_used: float | None = None
    mem_per_gpu: float | None = None
    unreadable: tuple = ()


KINDS = {field.name: field.type for field in fields(Run)}


def read_runs(path):
    """Return the Runs of a file, in its order; unknown columns are ignored.

    Raises ValueError if there is no header with a row_id.
    """
    path = Path(path)
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        table = csv.DictReader(file)
        if "row_id" not in [name.strip() for name in table.fieldnames or ()]:
            raise ValueError(f"{path.name} has no column row_id: it is no file of runs")
        name = path.stem.removeprefix("runs_")
        return tuple(_run(name, number, row) for number, row in enumerate(table, 2))


def _run(file, number, row):
    values, unreadable = {"file": file}, []
    for name, cell in row.items():
        name, cell = str(name).strip(), cell.strip() if isinstance(cell, str) else ""
        if not cell or name not in KINDS or name in ("file", "unreadable"):
            continue
        values[name] = cell if KINDS[name] is str else _number(cell, KINDS[name])
        if values[name] is None:
            unreadable.append(name)
    values.setdefault("row_id", f"{file} line {number}")
    return Run(**values, unreadable=tuple(unreadable))


def _number(cell, kind):
    """Return the number in a cell, or None for "OOM" and nan; a count must be whole and not
    negative.
    """
    try:
        value = float(cell.replace(",", ""))
    except ValueError:
        return None
    if not math.isfinite(value):
        return None
    if kind == int | None:
        return int(value) if value == int(value) and value >= 0 else None
    return value


def run_files():
    """Return the paths of the published runs, in order of their names."""
    return tuple(sorted(FOLDER.glob("runs_*.csv")))


def all_runs():
    """Return all published Runs, file by file."""
    return [run for path in run_files() for run in read_runs(path)]


def table(name):
    """Return the rows of a published table as dictionaries of text: table("nccl_busbw")."""
    with (FOLDER / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return tuple(csv.DictReader(file))
