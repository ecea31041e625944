"""A rank's metrics for Prometheus: an Exporter, and the hook that adds it to a Trainer.

Each rank has its own port, chosen by the system. Prometheus finds it through a file in `targets`
(file_sd), as it would find a pod through its API. The format is Prometheus' text format, 0.0.4.
"""

import contextlib
import json
import os
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

CPU_PEAK = 50e9  # FLOP/s of a core, as a round number: MFU on CPUs is only for show
METRICS = {  # name: (kind, help)
    "train_tokens_total": ("counter", "Tokens that this rank has trained since it began."),
    "train_steps_total": ("counter", "Steps since it began."),
    "train_step_seconds": ("gauge", "Of the last step, until the rank reached the collective."),
    "train_data_seconds": ("gauge", "Of the last step, for its batch; a part of step_seconds."),
    "train_flops_per_token": ("gauge", "Of the model, forward and backward."),
    "train_peak_flops": ("gauge", "FLOP/s that this rank's device could do."),
}
DCGM = {  # what dcgm-exporter exports by labs/jobs/monitoring/dcgm-metrics.csv, name by name
    "DCGM_FI_DEV_SM_CLOCK": ("gauge", "SM clock frequency (in MHz)."),
    "DCGM_FI_DEV_GPU_TEMP": ("gauge", "GPU temperature (in C)."),
    "DCGM_FI_DEV_POWER_USAGE": ("gauge", "Power draw (in W)."),
    "DCGM_FI_DEV_GPU_UTIL": ("gauge", "GPU utilization (in %)."),
    "DCGM_FI_DEV_FB_USED": ("gauge", "Framebuffer memory used (in MiB)."),
    "DCGM_FI_DEV_XID_ERRORS": ("gauge", "Value of the last XID error encountered."),
    "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL": ("counter", "Total number of single-bit volatile ECC errors."),
    "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS": (
        "counter", "Rows of memory remapped after correctable errors."),
    "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS": (
        "counter", "Rows remapped after uncorrectable errors."),
    "DCGM_FI_DEV_ROW_REMAP_FAILURE": ("gauge", "Whether remapping a row has failed."),
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": ("gauge", "Ratio of cycles the tensor pipe is active."),
}


class Exporter:
    """Serve metrics at http://address:port/metrics until the exporter is closed.

    labels: of all its series, such as {"run": "gpt", "rank": 2}
    targets: a folder, where a file tells Prometheus the exporter's address and host until it is
        closed. An exporter replaces a dead one with the same labels.
    metrics: {name: (kind, help)}: METRICS, or DCGM for a stand-in for dcgm-exporter, which exports
        the numbers that it is given, without a GPU
    """

    def __init__(self, labels, address="127.0.0.1", targets=None, metrics=METRICS):
        self.labels = ",".join(f'{name}="{value}"' for name, value in labels.items())
        self.metrics, self.values = metrics, {}
        exporter = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                body = exporter.text().encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer((address, 0), Handler)
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.file = targets and Path(targets, "-".join(map(str, labels.values())) + ".json")
        if self.file:  # whole at once: Prometheus watches the folder
            self.file.parent.mkdir(parents=True, exist_ok=True)
            new = self.file.with_suffix(".new")
            new.write_text(json.dumps([{"targets": [f"{address}:{self.port}"],
                                        "labels": {"host": socket.gethostname()}}]))
            os.replace(new, self.file)

    def set(self, **values):
        self.values |= values

    def add(self, **amounts):
        self.values |= {name: self.values.get(name, 0.0) + x for name, x in amounts.items()}

    def text(self):
        """Return the text that Prometheus scrapes."""
        return "".join(
            f"# HELP {name} {text}\n# TYPE {name} {kind}\n{name}{{{self.labels}}} "
            f"{self.values[name]}\n" for name, (kind, text) in self.metrics.items()
            if name in self.values)

    def close(self):
        if self.file:
            self.file.unlink(missing_ok=True)  # first, or Prometheus would miss it
        self.server.shutdown()
        self.server.server_close()


class Exported:
    """Export each step of a Trainer: class MyTrainer(Exported, TextTrainer).

    The seconds until the collective are the time during which this rank's main thread computed,
    plus the time it waited for its batch. On a CPU, a rank that waits for others uses no core.
    A GPU computes in parallel with the thread, so there you need CUDA events before the first
    collective.
    exporter: an Exporter, from `exporting`; None: nothing is exported
    """

    exporter, slept = None, 0.0

    def next_batch(self):
        start, busy = time.perf_counter(), time.thread_time()
        batch = super().next_batch()
        self.slept = time.perf_counter() - start - (time.thread_time() - busy)
        return batch

    def step(self, batch=None):
        before = time.thread_time()
        share = super().step(batch)
        seconds = time.thread_time() - before + self.slept
        if self.exporter:
            self.exporter.add(train_tokens_total=self.units_per_step / self.parallel.ranks,
                              train_steps_total=1)
            self.exporter.set(train_step_seconds=seconds, train_data_seconds=self.waits[-1])
        return share


@contextlib.contextmanager
def exporting(trainer, run, targets, address=None):
    """Export the trainer's steps to Prometheus inside the block, if there are `targets`.

    trainer: an Exported
    run: a label of all its series, like the rank
    address: None: the address of this host's name
    """
    if not targets:
        yield
        return
    address, ranks = address or socket.gethostbyname(socket.gethostname()), trainer.parallel.ranks
    trainer.exporter = Exporter({"run": run, "rank": trainer.parallel.rank}, address, targets)
    peak = trainer.peak_flops / ranks if trainer.peak_flops else CPU_PEAK
    trainer.exporter.set(train_flops_per_token=trainer.flops_per_token, train_peak_flops=peak)
    try:
        yield
    finally:
        trainer.exporter.close()
