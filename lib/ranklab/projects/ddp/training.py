"""Train a ResNet with DDP on all ranks, or trace some of its steps; and report."""

import statistics
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.parallel import DistributedDataParallel

from ranklab.basics.options import existing_folder, new_file, option
from ranklab.data.image_folder import Augment, ImageFolder, SyntheticImages
from ranklab.data_parallel.training import DataParallel
from ranklab.ddp import compress_fp16_hook, diagnose
from ranklab.engine import device, is_main_process, launch
from ranklab.engine.report import count_ranks
from ranklab.meter import Timeline, merged_trace
from ranklab.models.resnet import LEAST_WIDTH, STAGES, ResNet, ResNetConfig
from ranklab.projects.authors import authors
from ranklab.projects.command import LAUNCH_LIMIT, ranks_to_come
from ranklab.projects.ddp.image_trainer import ImageConfig, ImageTrainer
from ranklab.projects.runner import Drawn, OnRanks, Resumed
from ranklab.projects.training import Session, median_speed

WARMUP = 4  # steps that are not in a trace
MODELS = {f"resnet{depth}": depth for depth in STAGES}


@dataclass(frozen=True)
class Config(ImageConfig):
    """The defaults are ResNet-50 on ImageNet as usual: 76 to 77% top-1 in published runs."""

    data: str | None = option(None, "a folder with train/<class>/ and val/<class>/; by default "
                              "made-up images", kind=existing_folder)
    model: str = option("resnet50", "which ResNet", MODELS)
    width: int = option(64, "channels of the first layer", least=LEAST_WIDTH)
    norm: str = option("batch", "batch, or group: the same for any number of ranks",
                       ("batch", "group"))
    image: int = option(224, "pixels along each side", least=1)
    classes: int = option(1000, "of made-up images; a folder has its own", least=1)
    images: int = option(1_281_167, "made-up ones to train on", least=1)
    held_out: int = option(50_000, "made-up ones to score on", least=1)
    smallest_crop: float = option(0.08, "part of the area that a random crop keeps at least")
    flip: bool = option(True, "mirror half of the images")
    compile: bool = option(False, "torch.compile the model")
    compress: bool = option(False, "gradients travel as float16, by compress_fp16_hook")

    def __post_init__(self):
        super().__post_init__()
        self.shape(self.classes)  # width is checked there

    def shape(self, classes):
        """Return the ResNetConfig for this many classes."""
        return ResNetConfig(MODELS[self.model], classes, self.width, self.norm)


# ResNet-50 with an eighth of the channels on 32 x 32 pixels: the same 161 parameters in 50 layers,
# the same hooks, and 3,000 times less to compute.
LAPTOP = Config(width=8, image=32, classes=10, images=2048, held_out=512, epochs=2,
                batch_per_rank=32, warmup_epochs=1, workers=0, log_every=8)
SIZES = {"laptop": LAPTOP, "full": Config(precision="bf16")}


@dataclass(frozen=True)
class Options(OnRanks, Resumed, Drawn):
    """The command's options besides Config's."""

    size: str = option("laptop", "the other defaults", SIZES)
    scaling: bool = option(False, "strong and weak scaling; --figure draws it")
    profile: str | None = option(None, "a trace of a few steps in this file, for Perfetto",
                                 kind=new_file)

    def __post_init__(self):
        super().__post_init__()
        if self.figure and not self.scaling:
            raise ValueError("--figure draws what --scaling has found")

    def settings(self):
        return SIZES[self.size]


def run(size="laptop", half=compress_fp16_hook, **arguments):
    """Train the model on all ranks; return a dict of numbers.

    half       the hook for compress=True: the library's, or a learner's
    arguments  fields of Session and of Config
    """
    session, _, config = Session.divide(arguments, {}, SIZES[size])
    if not config.data:  # refuses now, not on the ranks
        config.steps_per_epoch(config.images, ranks_to_come(session.ranks))
    return session.launch(train, config, half)[0]


def train(session, config, half):
    """Train the model on each rank; return the results for `report`."""
    trainer = new_trainer(config, half=half, progress=session.progress)
    history = session.fit(trainer)
    top1 = history.held_out.get(trainer.schedule.steps)  # None: nothing was left to train
    if top1 is None and not trainer.stopped:
        top1 = trainer.evaluate()
    used = {"compress_fp16_hook": half} if config.compress else {}
    return {"config": config, "ranks": trainer.parallel.ranks, "steps": trainer.steps_done,
            "of_steps": trainer.schedule.steps, "history": history, "top1": top1,
            "held_out": len(trainer.held_out),
            "parameters": sum(p.numel() for p in trainer.model.parameters()),
            "authors": authors(used) or "No function of lab 04: torch's DDP does it all."}


def new_trainer(config, group=None, half=compress_fp16_hook, progress=False):
    """Return an ImageTrainer of a ResNet in DDP, the same on each rank of the group."""
    images, held_out = open_data(config)
    torch.manual_seed(config.seed)
    model = ResNet(config.shape(len(images.classes)))
    parallel = DataParallel(group, partial(wrap, config=config, half=half), equal_parts=True)
    return ImageTrainer(model, images, held_out, config, parallel, config.compile, progress)


def wrap(model, group, config, half):
    """Wrap the model in DDP as production runs do.

    gradient_as_bucket_view  gradients live in the buckets: no second copy of them stays in memory
    static_graph             every step uses the same parameters, so DDP looks for them once;
                             left off with torch.compile, which cuts the graph at buckets itself
    """
    place = device()
    ddp = DistributedDataParallel(
        model, device_ids=[place.index] if place.type != "cpu" else None, process_group=group,
        gradient_as_bucket_view=True, static_graph=not config.compile)
    if config.compress:
        ddp.register_comm_hook(group, half)
    return ddp


def open_data(config):
    """Return (images to train on, held-out images): a folder is listed, nothing decoded yet."""
    if not config.data:
        made_up = partial(SyntheticImages, size=config.image, classes=config.classes,
                          seed=config.seed)
        return made_up(config.images), made_up(config.held_out, first=config.images)
    augment = Augment(config.smallest_crop, flip=config.flip, seed=config.seed)
    images = ImageFolder(config.data, "train", config.image, augment)
    return images, ImageFolder(config.data, "val", config.image, classes=images.classes)


def report(results):
    """Format the results of `run` as text."""
    config, history, ranks = results["config"], results["history"], results["ranks"]
    speed, images = median_speed(history), ranks * config.batch_per_rank
    lines = [
        f"model     {config.model} of width {config.width}, {results['parameters']:,} parameters, "
        f"{config.image} x {config.image} pixels, {config.precision}",
        f"training  {results['steps']:,} of {results['of_steps']:,} steps of {images:,} images: "
        f"{count_ranks(ranks)} with {config.batch_per_rank} each",
        results["authors"],
    ]
    if speed > 0:  # not where nothing was logged
        wait = statistics.median(history.waits[1:] or history.waits)
        lines.append(f"speed     {speed:,.0f} images/s; {1e3 * images / speed:.1f} ms a step, of "
                     f"which the slowest loader takes {1e3 * wait:.1f}")
    goes_on = f"; {config.checkpoint} goes on with --resume" if config.checkpoint else ""
    lines.append(f"stopped   by SIGTERM{goes_on}" if results["top1"] is None else
                 f"held out  top-1 {results['top1']:.1%} of {results['held_out']:,} images")
    return "\n".join(lines)


def profile(config, path, ranks=None, steps=4, timeout=LAUNCH_LIMIT):
    """Write the merged trace to `path`, for Perfetto; return the verdict of diagnose as text."""
    timelines = launch(record, config, steps, ranks=ranks, timeout=timeout)
    if is_main_process():
        merged_trace(timelines, path)
    verdict, shares = diagnose([timeline.events for timeline in timelines])
    return f"{verdict}: " + ", ".join(f"{name} {part:.0%}" for name, part in shares.items())


def record(config, steps):
    """Return the Timeline of `steps` steps, on each rank."""
    trainer = new_trainer(config)
    for _ in range(WARMUP):
        trainer.step()
    with Timeline() as timeline:
        for _ in range(steps):
            trainer.step()
    return timeline
