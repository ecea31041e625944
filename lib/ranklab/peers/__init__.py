"""The production tools beside ours: each gives the same numbers, and the tests hold both together.

    mpi.py                 lab 02  the verbs by mpi4py
    deepspeed_zero.py      lab 06  DeepSpeed's ZeRO, alone and in the training loop
    deepspeed_ops.py               its own Adam, compiled where that is asked for
    fsdp2.py               lab 07  torch's fully_shard in the training loop
    hugging_face.py                Accelerate and transformers' Trainer; whether they sharded
    dtensor.py             lab 08  the same GPT by torch's DTensor
    megatron.py                    two linears by Megatron-core; a layout as options of Megatron-LM
    llama.py                       transformers' Llama by our tensor and context parallelism
    torch_pipelining.py    lab 09  a step by torch.distributed.pipelining
    deepspeed_ulysses.py   lab 10  ulysses_attention by DeepSpeed
    experts.py             lab 11  transformers' mixtures of experts over our ranks; DeepSpeed's MoE
    torch_hybrid.py        lab 12  DTensor, fully_shard or replicate, and pipelining on one mesh
    deepspeed_pipeline.py          DeepSpeed's PipelineModule with ZeRO-1
    torch_elastic.py       lab 14  DCP's async_save, and torch elastic

Nothing that is taught imports them. Horovod's own is built by `make horovod`, for lab 05.
"""

__all__ = [
    "deepspeed_ops", "deepspeed_pipeline", "deepspeed_ulysses", "deepspeed_zero", "dtensor",
    "experts", "fsdp2", "hugging_face", "llama", "megatron", "mpi", "torch_elastic", "torch_hybrid",
    "torch_pipelining",
]
