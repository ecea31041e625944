"""What devices can do, in SI units: FLOP/s, bytes, bytes/s. A100, H100, H200, B200: SXM modules.

Peaks are dense (vendors' sheets often quote the sparse number, which is twice as high) and with
float32 accumulation. Sources: NVIDIA's data sheets and architecture whitepapers of A10, A100, H100,
H200, HGX B200, L4 and Ada (RTX 4090), and pages of Azure, Google and Hot Chips for numbers that the
sheets lack. The L2 rates are not from vendors: their order of magnitude is from microbenchmarks.
"""

import os
import re
import time
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Level:
    """One level of the memory hierarchy, of the whole device."""

    name: str
    bytes: float
    bandwidth: float  # bytes/s; links: one direction


@dataclass(frozen=True)
class Device:
    """One device. Links count one direction: data sheets quote the sum of both."""

    name: str
    bf16_flops: float
    fp32_flops: float  # plain float32, no TF32
    memory_bytes: float
    memory_bandwidth: float
    sms: int = 0  # streaming multiprocessors
    clock: float = 0.0  # Hz, boost
    sram_bytes_per_sm: float = 0.0  # L1 and shared memory together
    l2_bytes: float = 0.0
    l2_bandwidth: float = 0.0
    nvlink_bandwidth: float = 0.0  # to the GPUs of the same node; 0: it has none
    host_bandwidth: float = 0.0  # PCIe x16
    network_bandwidth: float = 0.0  # a typical network card per GPU
    lanes: int = 128  # float32 multiply-adds an SM starts per clock

    def peak_flops(self, dtype=torch.bfloat16):
        """Return the peak FLOP/s of matrix products in `dtype`."""
        return self.fp32_flops if dtype == torch.float32 else self.bf16_flops

    @property
    def balance(self):
        """The FLOPs per byte at which arithmetic and memory take equally long (bf16)."""
        return self.bf16_flops / self.memory_bandwidth

    def levels(self):
        """List the levels of this device's memory hierarchy, from the fastest to the slowest.

        Registers: 256 KiB per SM on all devices; each lane reads three floats per clock.
        SRAM: each SM reads 128 bytes per clock. Both run at the boost clock.
        """
        all_levels = [
            Level("registers", self.sms * 256 * 1024, self.sms * self.lanes * 12 * self.clock),
            Level("SRAM", self.sms * self.sram_bytes_per_sm, self.sms * 128 * self.clock),
            Level("L2", self.l2_bytes, self.l2_bandwidth),
            Level("HBM" if self.memory_bandwidth > 1.2e12 else "memory", self.memory_bytes,
                  self.memory_bandwidth),
            Level("NVLink peers", 7 * self.memory_bytes, self.nvlink_bandwidth),
            Level("host", 2e12, self.host_bandwidth),
            Level("network", float("inf"), self.network_bandwidth),
        ]  # fmt: skip
        return [level for level in all_levels if level.bytes and level.bandwidth]


MB, GB = 1e6, 1e9

A10 = Device("A10", 125e12, 31.2e12, 24 * GB, 600 * GB, 72, 1.695e9, 128 * 1024,
             6 * MB, 2e12, 0, 32 * GB, 12.5 * GB)
A100 = Device("A100", 312e12, 19.5e12, 80 * GB, 2039 * GB, 108, 1.41e9, 192 * 1024,
              40 * MB, 5e12, 300 * GB, 32 * GB, 25 * GB, 64)
H100 = Device("H100", 989.4e12, 66.9e12, 80 * GB, 3350 * GB, 132, 1.83e9, 256 * 1024,
              50 * MB, 7e12, 450 * GB, 64 * GB, 50 * GB)
H200 = Device("H200", 989.4e12, 66.9e12, 141 * GB, 4800 * GB, 132, 1.83e9, 256 * 1024,
              50 * MB, 7e12, 450 * GB, 64 * GB, 50 * GB)
B200 = Device("B200", 2250e12, 75e12, 180 * GB, 7700 * GB, 148, 1.85e9, 256 * 1024,
              126 * MB, 12e12, 900 * GB, 64 * GB, 50 * GB)
L4 = Device("L4", 121e12, 30.3e12, 24 * GB, 300 * GB, 58, 2.04e9, 128 * 1024,
            48 * MB, 2.5e12, 0, 32 * GB, 12.5 * GB)
RTX_4090 = Device("RTX 4090", 165.2e12, 82.6e12, 24 * GB, 1008 * GB, 128, 2.52e9, 128 * 1024,
                  72 * MB, 5e12, 0, 32 * GB, 1.25 * GB)
GPUS = (A10, A100, H100, H200, B200, L4, RTX_4090)


def find(name):
    """Return the Device whose name is a word of `name`, or None.

    find("NVIDIA H100 80GB HBM3") is H100.
    """
    # whole words: an A1000 is no A100, and an L40S is no L4
    return next((gpu for gpu in GPUS if re.search(rf"\b{gpu.name}\b", name)), None)


def present(device="cpu"):
    """Return the Device for `device`: a GPU from the table, or else measured values."""
    device = torch.device(device)
    if device.type != "cuda":
        return measured(device, f"this CPU ({torch.get_num_threads()} threads)")
    name = torch.cuda.get_device_name(device)
    return find(name) or measured(device, name)


def measured(device, name, seconds=0.3):
    """Measure a Device: its best matrix product and its best copy, within `seconds` each.

    A CPU is measured with torch's current number of threads: the peak that training can reach here.
    """
    device = torch.device(device)
    bf16, fp32 = (best_matmul_flops(dtype, device, seconds)
                  for dtype in (torch.bfloat16, torch.float32))  # fmt: skip
    source = torch.ones(16 * 1024 * 1024, device=device)  # 64 MB: more than most caches hold
    target = torch.empty_like(source)
    copied = best_seconds(lambda: target.copy_(source), device, seconds)
    if device.type == "cuda":
        memory = (torch.cuda.get_device_properties(device).total_memory
                  * torch.cuda.get_per_process_memory_fraction(device))  # ranks may share it
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Device(name, bf16, fp32, memory, 2 * source.nbytes / copied)


def best_matmul_flops(dtype=torch.float32, device="cpu", seconds=0.3):
    """Measure the FLOP/s of the fastest square matrix product within `seconds`."""
    n = 768 if torch.device(device).type == "cpu" else 8192
    a, b = (torch.ones(n, n, dtype=dtype, device=device) for _ in range(2))
    return 2 * n**3 / best_seconds(lambda: a @ b, device, seconds)


def best_seconds(work, device="cpu", seconds=0.3):
    """Measure the shortest time of `work` among the runs that fit into `seconds`.

    A first run, as a warm-up, does not count. The shortest time is used, not the mean, because
    other programs may use the machine as well.
    """

    def wait():  # a launch on a GPU returns before its work is done
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize(device)

    def timed():
        start = time.perf_counter()
        work()
        wait()
        return time.perf_counter() - start

    timed()
    end = time.perf_counter() + seconds
    runs = [timed()]
    while time.perf_counter() < end:
        runs.append(timed())
    return min(runs)
