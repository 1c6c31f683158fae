"""Terminal display of a run while it trains."""

from rich import progress

from largebatch.tasks.kinds import CLASSIFICATION, TaskKind
from largebatch.terminal import Console, duration, four_digits, print_table

LONG_RUN_SEC = 600  # the time of a longer run is printed once its speed is known
SLOW_CALL_SEC = 5  # in a call this long the one-off work of the first step is negligible


class Reporter:
    """Progress display: a bar and a line per outer loop on a terminal, plain lines elsewhere."""

    def __init__(self, kind: TaskKind = CLASSIFICATION, *, enabled: bool):
        self._kind, self._num_calls, self._knows_speed = kind, 0, False
        self._console = Console(enabled=enabled)
        self._bar = progress.Progress(
            progress.BarColumn(),
            progress.TextColumn("{task.completed:.0f}/{task.total:.0f} steps"),
            progress.TextColumn("{task.fields[rate]}"),
            progress.TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not (enabled and self._console.is_terminal),
        )
        self._task = self._bar.add_task("training", rate="")

    def __enter__(self):
        self._bar.start()
        return self

    def __exit__(self, *_):
        self._bar.stop()

    def start(self, total_steps: int, step: int, headline: str) -> None:
        """Print the headline and start the bar, before the first step, number `step` of `total_steps`."""
        self.line(headline)
        self._bar.update(self._task, total=total_steps, completed=step)

    def line(self, text: str) -> None:
        """Print one line above the bar."""
        self._console.print(text, soft_wrap=True)

    def at(self, step: int, images: int, seconds: float, images_left: int) -> None:
        """Move the bar to `step`, and print once how long a long run will take.

        The first call is a single step, which may be several times slower than later ones. It counts as a
        measurement of the speed only if it takes long.

        Args:
          images, seconds: training images and duration of the last call of the compiled loop.
          images_left: training images from here to the last step.
        """
        images_per_sec = images / seconds
        seconds_left = images_left / images_per_sec
        if not self._knows_speed and (self._num_calls or seconds > SLOW_CALL_SEC):
            self._knows_speed = True
            if seconds_left > LONG_RUN_SEC:
                self.line(f"about {duration(seconds_left)} of training, at {images_per_sec:,.0f} images/s")
        self._num_calls += 1
        self._bar.update(self._task, completed=step, rate=f"{images_per_sec:,.0f} images/s")

    def row(self, row: dict, outer_steps: int) -> None:
        """Print the line of one outer loop."""
        texts = [
            f"outer {row['outer']:>4}/{outer_steps}",
            f"step {row['step']:>6}",
            f"epoch {row['epoch']:8.2f}",
            f"train loss {four_digits(row['train_loss'])}",
            f"val loss {row['val_loss']:.4f}",
            f"val {self._kind.score_words} {row['val_score']:.4f}{self._others(row)}",
            f"{row['images_per_sec']:>10,.0f} images/s",
            f"{row['step_time_ms']:,.1f} ms/step",
        ]
        if row["mfu"] is not None:
            texts.append(f"mfu {row['mfu']:.1%}")
        if row["device_memory_peak_bytes"] is not None:
            texts.append(f"memory {row['device_memory_peak_bytes'] / 1e9:.1f} GB")
        if row["noise_scale"] is not None:
            texts.append(f"noise scale {row['noise_scale']:,.0f}")
        self.line("  ".join(texts))

    def results(self, summary: dict, workdir: str) -> None:
        """Print the closing table."""
        if self._console.quiet:
            return
        words, steps_to_target = self._kind.score_words, summary["steps_to_target"]
        rows = {
            "status": summary["status"],
            f"best val {words}": f"{summary['best_score']:.4f} at step {summary['best_step']}",
            f"final val {words}": f"{summary['final_score']:.4f}{self._others(summary['final_others'])}",
            "steps": f"{summary['steps']:,}",
            "images seen": f"{summary['examples_seen']:,}",
            "images/s (median)": f"{summary['images_per_sec']:,.0f}",
            "seconds": "  ".join(f"{name} {sec:.1f}" for name, sec in summary["seconds"].items()),
            "devices": f"{summary['devices']} {summary['platform']}",
        }
        if steps_to_target is not None:
            images, seconds = summary["examples_to_target"], summary["sec_to_target"]
            rows["target"] = f"after {steps_to_target:,} steps, {images:,} images, {seconds:.1f} s of training"
        elif summary["target_score"] is not None:
            rows["target"] = "not reached"
        print_table(["run folder", workdir], [list(row) for row in rows.items()])

    def _others(self, row: dict) -> str:
        """Return the scores beside the plain one, as " (top5 0.9900, views 0.9500)"."""
        prefix = f"{self._kind.score_column}_"
        known = {name: value for name, value in row.items() if name.startswith(prefix) and value is not None}
        scores = [f"{name.removeprefix(prefix)} {value:.4f}" for name, value in known.items()]
        return f" ({', '.join(scores)})" if scores else ""
