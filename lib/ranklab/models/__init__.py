"""Models that know nothing of ranks: parallelism is applied from outside, by child name.

    gpt.py     GPT: the course's language model, and its parts
    cnn.py     CNN: a small convolutional net for images
    resnet.py  ResNet, for images of ImageNet's size (lab 04's project)
    initialise.py  weights from a seed and the parameter's name, so any shard can be made by itself
"""

from ranklab.models.cnn import CNN, CNNConfig
from ranklab.models.gpt import (
    GPT, MLP, Attention, Block, GPTConfig, count_parameters, cross_entropy,
)

__all__ = ["Attention", "Block", "CNN", "CNNConfig", "GPT", "GPTConfig", "MLP", "count_parameters",
           "cross_entropy"]
