"""Other kernels than this CPU's own: with them every verdict must be the same."""

import os
import subprocess
import sys

from conftest import ROOT

KERNELS = {  # beside this CPU's own, which every other test computes with
    "AVX2's": dict(ATEN_CPU_CAPABILITY="avx2", MKL_CBWR="AVX2", ONEDNN_MAX_CPU_ISA="AVX2"),
    "the oldest": dict(ATEN_CPU_CAPABILITY="default", MKL_CBWR="COMPATIBLE",
                       ONEDNN_MAX_CPU_ISA="SSE41")}


def on_kernels(kernels, name, limit=280):
    """Run on_kernels.py NAME with these kernels."""
    return subprocess.run([sys.executable, "on_kernels.py", name], cwd=ROOT / "tests",
                          env=os.environ | KERNELS[kernels], timeout=limit, capture_output=True,
                          text=True)
