# The course in a container: for CPUs, for NVIDIA's GPUs, or on top of NVIDIA's image (lab 15).
#     docker build -t ranklab .
#     docker build -t ranklab:cuda --build-arg TORCH=cu128 .
#     docker build -t ranklab:ngc --build-arg TORCH=base \
#         --build-arg BASE=nvcr.io/nvidia/pytorch:26.07-py3 .
#     docker run --rm --gpus all --ipc=host ranklab:cuda \
#         torchrun --nproc-per-node=gpu -m ranklab.projects.hybrid --layout 8x1x1
# In Slurm, by enroot and pyxis: `enroot import -o ranklab.sqsh dockerd://ranklab:cuda` once, then
# `srun --container-image=./ranklab.sqsh` in place of `srun`.
# PyTorch's CUDA wheels bring CUDA and NCCL: the host needs its driver and NVIDIA's container
# toolkit alone. NGC's image has a PyTorch of its own: with TORCH=base that one stays, and of
# the course only the projects are there, not the notebooks. (What is installed then was enough for
# lab 12's project, in an empty environment with PyTorch 2.13.0.)
# Checked: hadolint 2.15.1, by labs/jobs/validate.py; the workflow builds the first. Not run here:
# docker has no daemon on the machine where this was written.
ARG BASE=python:3.11-bookworm
FROM ${BASE}
ARG TORCH=cpu
WORKDIR /opt/ranklab
COPY . .
# NGC's image says by a file of its own which versions pip may take.
# hadolint ignore=DL3013
RUN if [ "$TORCH" = base ]; then \
        python -m pip install --no-cache-dir --no-deps -e . && \
        python -m pip install --no-cache-dir cloudpickle tqdm pyyaml psutil; \
    else make setup TORCH="$TORCH"; fi
ENV PATH=/opt/ranklab/.venv/bin:$PATH
CMD ["ranklab", "doctor"]
