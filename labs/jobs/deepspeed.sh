#!/bin/bash
# GPT-2 1.3B by DeepSpeed's own launcher (lab 06), in the fastest way that fits the machines.
#     GPUS=4 GPU_GB=24 labs/jobs/deepspeed.sh                        # this machine
#     HOSTFILE=hosts GPUS=16 GPU_GB=24 labs/jobs/deepspeed.sh        # run on the first node alone
# A hostfile has a line for each node: its name and its GPUs, such as `node-0 slots=8`; ssh must
# reach each of them without a password, and all must see this folder. With torchrun instead:
#     labs/jobs/torchrun.sh zero --size 1.3b --engine deepspeed --config build/ds.json
set -eu
GPUS=${GPUS:?"how many GPUs in all, such as: GPUS=4 GPU_GB=24 labs/jobs/deepspeed.sh"}
config=build/ds.json
size=(--size "${SIZE:-1.3b}")
mkdir -p build
.venv/bin/python -m ranklab.projects.zero "${size[@]}" --gpus "$GPUS" --gpu-gb "${GPU_GB:-24}" \
    --write-config "$config"

if [ -n "${HOSTFILE:-}" ]; then
    where=(--hostfile "$HOSTFILE")
else
    where=(--num_gpus "$GPUS")
fi
# DeepSpeed starts `python` and `ninja` on every node by their names.
export PATH=$PWD/.venv/bin:$PATH
exec deepspeed "${where[@]}" --module ranklab.projects.zero "${size[@]}" --engine deepspeed \
    --config "$config" "$@"
