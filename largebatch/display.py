"""What a person sees of a run while it trains."""

import os
import sys

from rich import box, console, progress, table


def _four_digits(value: float | None) -> str:
    return "none" if value is None else f"{value:.4f}"


class _Console(console.Console):
    """Goes quiet when nobody reads any more (`| head`, a `| tee` that Ctrl-C ended), which rich exits at."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Reporter:
    """What a person sees: a progress bar and a line per outer loop on a terminal, plain lines elsewhere."""

    def __init__(self, total_updates: int, *, enabled: bool):
        width = None if sys.stdout.isatty() else 200  # a log is not cut at 80 columns
        self._console = _Console(quiet=not enabled, highlight=False, width=width)
        self._bar = progress.Progress(
            progress.BarColumn(),
            progress.TextColumn("{task.completed:.0f}/{task.total:.0f} updates"),
            progress.TextColumn("{task.fields[rate]}"),
            progress.TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not (enabled and self._console.is_terminal),
        )
        self._task = self._bar.add_task("training", total=total_updates, rate="")

    def __enter__(self):
        self._bar.start()
        return self

    def __exit__(self, *_):
        self._bar.stop()

    def line(self, text: str) -> None:
        """Prints one line above the bar."""
        self._console.print(text, markup=False, soft_wrap=True)

    def at(self, step: int, images_per_sec: float) -> None:
        """Moves the bar to update `step`."""
        self._bar.update(self._task, completed=step, rate=f"{images_per_sec:,.0f} images/s")

    def row(self, row: dict, outer_steps: int) -> None:
        """The line of one outer loop."""
        self.line(
            f"outer {row['outer']:>4}/{outer_steps}  step {row['step']:>6}  epoch {row['epoch']:8.2f}  "
            f"train loss {_four_digits(row['train_loss'])}  val loss {row['val_loss']:.4f}  "
            f"val accuracy {row['val_accuracy']:.4f}  {row['images_per_sec']:>10,.0f} images/s  "
            f"{row['step_time_ms']:,.1f} ms/update"
        )

    def results(self, summary: dict, workdir: str) -> None:
        """The closing table."""
        out = table.Table(box=box.SIMPLE, show_header=False)
        out.add_column(no_wrap=True)
        out.add_column(overflow="fold")
        rows = {
            "status": summary["status"],
            "best val accuracy": f"{summary['best_val_accuracy']:.4f} at update {summary['best_step']}",
            "final val accuracy": f"{summary['final_val_accuracy']:.4f}",
            "updates": f"{summary['steps']:,}",
            "images seen": f"{summary['examples_seen']:,}",
            "images/s (median)": f"{summary['images_per_sec']:,.0f}",
            "seconds": "  ".join(f"{name} {sec:.1f}" for name, sec in summary["seconds"].items()),
            "devices": f"{summary['devices']} {summary['platform']}",
            "run folder": workdir,
        }
        if summary["target_accuracy"] is not None:
            reached = summary["steps_to_target"]
            rows["target"] = f"{summary['target_accuracy']:.4f} " + (
                "not reached"
                if reached is None
                else f"after {reached:,} updates, {summary['examples_to_target']:,} images, "
                f"{summary['sec_to_target']:.1f} s of training"
            )
        for name, value in rows.items():
            out.add_row(name, value)
        self._console.print(out)
