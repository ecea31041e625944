"""The production tools: each gives the same numbers as our code, and tests compare the two.

    mpi.py                 lab 02  the verbs with mpi4py
    deepspeed_zero.py      lab 06  DeepSpeed's ZeRO, on its own and in the training loop
    deepspeed_ops.py               DeepSpeed's own Adam, compiled on request
    fsdp2.py               lab 07  torch's fully_shard in the training loop
    hugging_face.py                Accelerate and transformers' Trainer; whether they sharded
    dtensor.py             lab 08  the same GPT with torch's DTensor
    megatron.py                    two linears with Megatron-core; a layout as Megatron-LM options
    llama.py                       transformers' Llama with our tensor and context parallelism
    torch_pipelining.py    lab 09  a step with torch.distributed.pipelining
    deepspeed_ulysses.py   lab 10  ulysses_attention, tiled loss and MLP with DeepSpeed
    experts.py             lab 11  transformers' mixtures of experts on our ranks; DeepSpeed's MoE
    torch_hybrid.py        lab 12  DTensor, fully_shard or replicate, and pipelining on one mesh
    deepspeed_pipeline.py          DeepSpeed's PipelineModule with ZeRO-1
    torch_elastic.py       lab 14  DCP's async_save, and torch elastic

Code that the labs teach does not import them. `make horovod` builds Horovod itself, for lab 05.
"""

__all__ = [
    "deepspeed_ops", "deepspeed_pipeline", "deepspeed_ulysses", "deepspeed_zero", "dtensor",
    "experts", "fsdp2", "hugging_face", "llama", "megatron", "mpi", "torch_elastic", "torch_hybrid",
    "torch_pipelining",
]
