"""What each rank reads: its share of a shuffled epoch to train on, its share of the held-out set.

To train, torch's DistributedSampler: all ranks shuffle alike, by (seed, epoch), and take every
R-th image. To evaluate, no padding and no image twice, so that the counts are exact.
"""

import itertools
import signal

import torch
from torch.utils.data import DataLoader, DistributedSampler

from ranklab.data.image_folder import Augment, ImageFolder, SyntheticImages

PREFETCH = 4  # batches that each worker keeps ready


def open_data(config):
    """(images to train on, held-out images); a folder is listed, nothing is decoded yet."""
    if config.data == "synthetic":
        size, classes, seed = config.image, config.classes, config.seed
        return (SyntheticImages(config.images, size, classes, seed=seed),
                SyntheticImages(config.held_out, size, classes, config.images, seed))  # fmt: skip
    augment = Augment(config.smallest_crop, flip=config.flip, seed=config.seed)
    train = ImageFolder(config.data, "train", config.image, augment)
    return train, ImageFolder(config.data, "val", config.image, classes=train.classes)


class EpochSampler(DistributedSampler):
    """DistributedSampler, but it hands out (epoch, index) and can begin in the middle.

    The epoch travels with each index, because workers that persist have copies of the data set,
    and would not see that an attribute of ours has changed.
    """

    done = 0  # images of this rank that the epoch has already had

    def start(self, epoch, done=0):
        """The next pass is this epoch, without the first `done` images of this rank."""
        self.set_epoch(epoch)  # forgotten, every epoch has the same order
        self.done = done

    def __iter__(self):
        rest = itertools.islice(super().__iter__(), self.done, None)
        return ((self.epoch, index) for index in rest)


def steps_in_epoch(images, config, ranks):
    """How many whole steps so many images are.
    error  ValueError where they are less than one
    """
    if images < ranks * config.batch_per_rank:
        raise ValueError(f"{images} images are less than one step: {ranks} ranks of "
                         f"batch_per_rank={config.batch_per_rank} take "
                         f"{ranks * config.batch_per_rank}")  # fmt: skip
    return images // ranks // config.batch_per_rank


def train_loader(images, config, rank, ranks, device):
    """(loader, its sampler, steps in an epoch) of this rank; a last batch too small is dropped."""
    sampler = EpochSampler(images, ranks, rank, seed=config.seed, drop_last=True)
    steps = steps_in_epoch(len(images), config, ranks)
    loader = _loader(images, config, sampler, device, drop_last=True,
                     persistent_workers=config.workers > 0 and config.epochs > 1)  # fmt: skip
    return loader, sampler, steps


def held_out_loader(images, config, rank, ranks, device):
    """The held-out images rank, rank + R, rank + 2R, ...: over all ranks each of them once."""
    mine = [(0, index) for index in range(rank, len(images), ranks)]
    return _loader(images, config, mine, device)


def _loader(images, config, sampler, device, **options):
    return DataLoader(
        images, config.batch_per_rank, sampler=sampler, num_workers=config.workers,
        pin_memory=device.type != "cpu",  # so that copies to the GPU run beside its work
        prefetch_factor=PREFETCH if config.workers else None,
        worker_init_fn=outlive_sigterm, generator=torch.Generator(), **options,
    )  # fmt: skip


def outlive_sigterm(_worker):
    """A SIGTERM to the job reaches the workers too; the last steps still need them."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
