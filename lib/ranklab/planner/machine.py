"""A machine: GPUs, the link between the GPUs of a node, and the network between nodes.

Numbers come from published/hardware_accelerators.csv and hardware_nodes.csv. Those that these lack
are here.
"""

import functools
import json
import re
from dataclasses import dataclass, replace

from ranklab.planner.published import table

FP8_MEASURED = 0.93  # of twice bf16's best: 1402.6 of 2 x 794.5 (H100), 3432.5 of 2 x 1745 (B200)
BF16_MEASURED = 0.83  # of the peak, where no measured rate is published: their usual share
FP4 = {"B200": 2.0, "GB200": 2.0, "B300": 3.0, "GB300": 3.0}  # dense, of FP8's peak (recalled)
PROCESSORS = {"V100": 80, "T4": 40, "A100": 108, "A800": 108, "A10G": 80, "RTX": 128, "L4": 58,
              "L40S": 142, "H100": 132, "H200": 132, "H800": 132, "GH200": 132,
              "B200": 148, "GB200": 152,
              "B300": 148, "GB300": 152}  # streaming multiprocessors (recalled)
UNKNOWN_SHARE = 0.91  # of the nominal GiB, where no log is known; of the others an A10G has least
OTHER_NAMES = {"GB200-NVL72": "GB200-SXM", "GB300-NVL72": "GB300-SXM", "B300-SXM-288GB": "B300-SXM",
               "V100-SXM3-32GB": "V100-SXM2-32GB", "A800-SXM-80GB": "A100-SXM-80GB",
               "H100-SXM": "H100-SXM-80GB", "H100": "H100-SXM-80GB", "A100": "A100-SXM-80GB"}
UNPUBLISHED = {"H100-SXM-96GB-HBM2e-500W": 912}  # TFLOP/s: between H100 SXM's 989 and NVL's 835
NO_BF16 = {"V100", "T4"}  # fp16 instead; FlashAttention 2 needs Ampere or later, too
NETWORK = {"V100": 6.25e9, "A100": 25e9, "H100": 50e9, "H200": 50e9, "B200": 50e9, "GB200": 50e9,
           "B300": 100e9, "GB300": 100e9}  # bytes/s a GPU of NVIDIA's own nodes (hardware_nodes)


def dtype_of(accelerator):
    """Return what models are trained in on these GPUs: bf16, or fp16 if they have no bf16."""
    return "fp16" if accelerator.partition("-")[0] in NO_BF16 else "bf16"


@dataclass(frozen=True)
class Machine:
    """The memory and speed of a GPU and its links, in bytes, bytes/s and FLOP/s.

    accelerator   the GPU's name in the table; name: the node's name, or the same
    peak_flops    of dense bf16 (fp16 if it has no bf16)
    flops         {precision: FLOP/s of the best matrix products}, measured if that is published
    node          number of consecutive GPUs that the scale-up link joins
    link          bytes/s of a GPU, one direction; network: likewise, for its share of the cards
    island, far   number of consecutive GPUs that this network joins, and a GPU's bytes/s between
                  such islands; 0: the network joins all
    processors    that compute at once: the tiles of a product run in waves of this number
    host, host_memory  bytes/s between a GPU and its host; of the host's memory, for all its GPUs
    """

    name: str
    peak_flops: float
    bf16: float
    fp8: float
    fp4: float
    peak_fp8: float
    memory_bytes: float
    memory_bandwidth: float
    node: int = 8
    link: float = 300e9
    network: float = 25e9
    watts: float = 0.0
    island: int = 0
    far: float = 0.0
    host: float = 25e9  # of PCIe 4 x16, assumed
    host_memory: float = 200e9  # assumed
    accelerator: str = ""
    processors: int = 108

    @property
    def family(self):
        """The kind of GPU, regardless of memory and form factor: H100 for H100-SXM-80GB."""
        return self.accelerator.partition("-")[0]

    def rate(self, precision):
        """Return the FLOP/s of the best matrix products in this precision, or in the next wider one
        that the GPU has.
        """
        if precision == "nvfp4":
            return self.fp4 or self.rate("fp8")
        return self.fp8 or self.bf16 if "fp8" in precision else self.bf16

    def peak(self, precision="bf16"):
        """Return the dense FLOP/s that vendors quote."""
        if precision == "bf16" or not self.fp8:
            return self.peak_flops
        return self.peak_fp8 * (self.fp4 / self.fp8 if precision == "nvfp4" else 1)


# What a node file may say, wide enough for a CPU that is measured, and for one rank, whose link is
# 1e15; a number of TFLOP/s, GB, GB/s or Gbit/s is far below.
RANGES = {  # fields: (unit, the least, the most, may it be 0, for none?)
    ("peak_flops", "bf16"): ("FLOP/s", 1e7, 1e17, False),
    ("fp8", "fp4", "peak_fp8"): ("FLOP/s", 1e7, 1e17, True),
    ("memory_bytes", "host_memory"): ("bytes", 1e8, 1e15, False),
    ("memory_bandwidth", "host", "link", "network"): ("bytes/s", 1e5, 1e16, False),
    ("far",): ("bytes/s", 1e5, 1e16, True),
    ("watts",): ("watts", 1, 1e5, True),
    ("node", "processors"): ("a whole number", 1, 1e6, False),
    ("island",): ("a whole number", 1, 1e6, True),
}


def refuse_values(values):
    """Raise a ValueError for a field of a Machine that can't have this value: it names the unit."""
    for names, (unit, least, most, may_be_none) in RANGES.items():
        whole = unit == "a whole number"
        for name in (name for name in names if name in values):
            value = values[name]
            is_number = isinstance(value, int if whole else (int, float)) and not isinstance(
                value, bool)
            if is_number and (least <= value <= most or may_be_none and value == 0):
                continue
            usual = getattr(machine("H100-SXM-80GB"), name)
            raise ValueError(
                f"{name}={json.dumps(value)} must be {unit if whole else f'a number of {unit}'}, "
                f"from {with_exponent(least)} to {with_exponent(most)}{', or 0' * may_be_none}: "
                f"an H100 has {with_exponent(usual)}")


def with_exponent(number):
    """Format a number as 8, 700 or 9.89e14."""
    return re.sub(r"e\+0?", "e", f"{number:.4g}")


@functools.cache
def machine(name, node=0, network=0.0):
    """Return the Machine of this name in the table of accelerators.

    node     GPUs that NVLink joins; 0: 72 in an NVL72, else 8
    network  bytes/s of a GPU; 0: as in the vendor's own node
    Any case of letters will do. Raises ValueError with the known names.
    """
    rows = {row["name"]: row for row in table("hardware_accelerators")}
    plain = re.sub(r"\s*\(.*\)", "", name).strip()  # in the table's case, if it is there
    plain = {each.lower(): each for each in accelerators()}.get(plain.lower(), plain)
    accelerator = OTHER_NAMES.get(plain, plain)
    if accelerator not in rows:
        raise ValueError(f"{name!r} is no accelerator of the table: {', '.join(rows)}")
    row, family = rows[accelerator], accelerator.partition("-")[0]
    number = {key: float(row[key] or 0) for key in (
        "dense_bf16_fp16_tflops", "dense_fp8_tflops", "mem_gb", "mem_bw_tb_s",
        "scaleup_gb_s_per_direction", "tdp_w", "measured_max_matmul_bf16_tflops")}
    peak = (number["dense_bf16_fp16_tflops"] or UNPUBLISHED.get(accelerator, 0)) * 1e12
    if not peak:
        raise ValueError(f"{name!r}: no peak of it is published")
    best = number["measured_max_matmul_bf16_tflops"] * 1e12 or BF16_MEASURED * peak
    peak_fp8 = number["dense_fp8_tflops"] * 1e12 or 2 * peak * family.startswith("H")
    fp8 = 2 * FP8_MEASURED * best if peak_fp8 else 0.0
    gib = float(row["cuda_gib"] or UNKNOWN_SHARE * number["mem_gb"])
    gpu = Machine(name, peak, best, fp8, fp8 * FP4.get(family, 0), peak_fp8,
                  gib * 2**30, number["mem_bw_tb_s"] * 1e12,
                  node or (72 if "NVL72" in plain else 8),
                  number["scaleup_gb_s_per_direction"] * 1e9,
                  network or NETWORK.get(family, 12.5e9), number["tdp_w"],
                  accelerator=accelerator, processors=PROCESSORS.get(family, 108))
    return replace(gpu, link=200e9) if plain.startswith(("A800", "H800")) else gpu


def accelerators():
    """Return all names that `machine` knows."""
    return [*OTHER_NAMES, *(row["name"] for row in table("hardware_accelerators"))]


def is_gpu(name):
    """Return whether the planner knows this device's links; not for TPUs and others."""
    return re.match(r"G?[VAHBTL]\d|RTX", name) is not None
