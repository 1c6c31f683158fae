"""How large the rows of `bench.py card` are."""

from dataclasses import dataclass, field

from benchmarks.peers import serve


@dataclass(frozen=True)
class Size:
    """Batch sizes and micro-batches that are measured.

    Attributes:
      batch_sizes: of the rows beside PyTorch; the first is that of most worth.
      variants: batch sizes at which our variants are measured.
      micro_batch_sizes, torch_micro_batch_sizes: by batch size, of ours and of PyTorch; 0 is the whole batch.
      num_images: that lie on the devices, or a batch if that is more.
      profiled_updates: by batch size.
      patience: multiplies the seconds without which a row is not begun.
      train: more arguments of train.py.
    """

    batch_sizes: tuple[int, ...]
    variants: tuple[int, ...]
    micro_batch_sizes: dict[int, tuple[int, ...]]
    torch_micro_batch_sizes: dict[int, tuple[int, ...]]
    profiled_updates: dict[int, int]
    num_images: int = serve.NUM_IMAGES
    repeats: int = 5
    min_timed_sec: float = 0.5
    patience: float = 1.0
    seeds: int = 5
    train: tuple[str, ...] = field(default=())


SIZES = {
    "card": Size(
        batch_sizes=(172_800, 512, 21_600),
        variants=(172_800, 512),
        micro_batch_sizes={172_800: (5_400, 2_700, 10_800, 21_600, 1_350), 512: (512, 256)},
        torch_micro_batch_sizes={172_800: (43_200, 21_600, 5_400), 21_600: (21_600, 5_400), 512: (0,)},
        profiled_updates={172_800: 1, 512: 20},
    ),
    "cpu": Size(
        batch_sizes=(4_096, 512),
        variants=(512,),
        micro_batch_sizes={512: (8, 16, 32, 64)},
        torch_micro_batch_sizes={4_096: (128, 256), 512: (128, 256)},
        profiled_updates={512: 2},
    ),
    # For tests: the rows are there, their figures are worth nothing.
    "tiny": Size(
        batch_sizes=(64,),
        variants=(64,),
        micro_batch_sizes={64: (8,)},
        torch_micro_batch_sizes={64: (16,)},
        profiled_updates={64: 2},
        num_images=64,
        repeats=2,
        min_timed_sec=0.0,
        patience=0.01,
        seeds=1,
        train=(
            "--config.dataset.image_size=8",
            "--config.train.inner_steps=2",
            "--config.train.outer_steps=1",
            "--config.batch.size=16",
            "--config.schedule.warmup_updates=None",
        ),
    ),
}
