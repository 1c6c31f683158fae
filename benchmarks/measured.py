"""bench.py measured: puts the rows that `bench.py card` wrote into docs/measured.json, docs/hardware.md and README.

A row replaces the one of its name and card that was there. Rows that were skipped or failed are no figures.
"""

import collections
import json
from pathlib import Path

from benchmarks import pages
from largebatch.cli import ROOT
from largebatch.util import UserError

ROWS, PAGE, README = ROOT / "docs" / "measured.json", ROOT / "docs" / "hardware.md", ROOT / "README.md"
KEPT_KERNELS = 40  # of a profile; the table shows the first
SHOWN_KERNELS = 8
SECTIONS = ("ceilings", "step", "variants", "start", "recipes", "profile")


def bench_measured(path: str) -> dict:
    """Brings rows and page up to date.

    Args:
      path: of a file that `bench.py card --json` wrote.
    Raises:
      UserError: it is none.
    """
    new = rows_of(path)
    rows = {key(row): row for row in [*pages.read_rows(ROWS), *new]}
    write_rows(list(rows.values()))
    return {"new": len(new), "rows": list(rows.values())}


def key(row: dict) -> tuple:
    """Return what identifies a figure, which a later one replaces: device, number of devices and name."""
    return row["device_kind"], row["devices"], row["name"]


def rows_of(path: str) -> list[dict]:
    """The rows of a file that were measured, each with the machine, the date and the code.

    Raises:
      UserError: it cannot be read, or is of another command.
    """
    try:
        result = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"--path: {path} cannot be read: {error}") from error
    if not isinstance(result, dict) or result.get("command") != "card" or "device_kind" not in result:
        raise UserError(f"--path: {path}; allowed: a file that bench.py card --json wrote")
    about = {name: result[name] for name in ("device_kind", "devices", "platform", "date", "versions")}
    about["commit"] = result["git_commit"] or result["code_sha256"]  # the second outside a checkout
    return [{**about, **as_kept(row)} for row in result["rows"] if row["status"] == "measured"]


def as_kept(row: dict) -> dict:
    """A row without what a reader does not need."""
    row = {name: value for name, value in row.items() if name not in ("status", "took_sec")}
    if "kernels" in row:
        row["kernels"] = row["kernels"][:KEPT_KERNELS]
    return row


def write_rows(rows: list[dict]) -> None:
    """Keep the rows, and put their tables into the page and the steps into README."""
    ordered = sorted(rows, key=lambda row: (row["device_kind"], row["devices"], SECTIONS.index(row["section"])))
    pages.write_rows(ROWS, ordered)
    pages.write_part(PAGE, "measured", tables(ordered))
    pages.write_part(README, "measured", steps(ordered))


# ---- tables ---------------------------------------------------------------------------------------------


def tables(rows: list[dict]) -> str:
    """All rows as Markdown, a table for each section that has any."""
    parts = []
    for section, (title, header, cells) in TABLES.items():
        of_section = [row for row in rows if row["section"] == section]
        if of_section:
            parts.append(
                f"{title}\n\n{pages.markdown_table((*header, 'measured'), map(with_origin(cells), of_section))}"
            )
    parts += [kernel_table(row) for row in rows if row["section"] == "profile"]
    return "\n".join(parts)


def steps(rows: list[dict]) -> str:
    """Return the table of README: the step as `train.py` chose it and at its fastest, beside PyTorch, by batch."""
    cells, rates = [], collections.defaultdict(list)  # rates of ours by batch, card and commit
    for row in rows:
        if row["section"] in ("step", "variants"):
            rates[same_code(row)].append(row["ours"]["images_per_sec"])
    for row in rows:
        if row["section"] == "step" and row["pytorch"]:
            chosen, theirs = row["ours"]["images_per_sec"], row["pytorch"]["images_per_sec"]
            ratios = [f"{chosen / theirs:.2f}", f"{max(rates[same_code(row)]) / theirs:.2f}"]
            cells.append([machine(row), f"{row['batch_size']:,}", f"{chosen:,.0f}", *ratios, origin(row)])
    header = ("device", "batch", "images/s", "beside PyTorch", "fastest variant beside it", "measured")
    return pages.markdown_table(header, cells)


def same_code(row: dict) -> tuple:
    """Return what rows of a step have in common whose variants may be compared."""
    return tuple(row[name] for name in ("batch_size", "device_kind", "devices", "commit"))


def with_origin(cells):
    """`cells` of a row with where it is from behind them."""
    return lambda row: [machine(row), *cells(row), origin(row)]


def machine(row: dict) -> str:
    """The devices of a row."""
    return row["device_kind"] if row["devices"] == 1 else f"{row['devices']} x {row['device_kind']}"


def origin(row: dict) -> str:
    """Date, code and libraries of a row."""
    torch = (row.get("pytorch") or {}).get("torch")
    libraries = [f"jax {row['versions']['jax']}", *([f"torch {torch}"] if torch else [])]
    changed = "+" if row["commit"].endswith("+") else ""  # files differed from the commit
    return ", ".join([row["date"], row["commit"][:12] + changed, *libraries])


def ceiling_cells(row: dict) -> list[str]:
    """Return the cells of a ceiling: its name and its rate."""
    return [row["name"], f"{row['rate']:,.0f} {row['unit']}"]


def step_cells(row: dict) -> list[str]:
    """Our step beside PyTorch's."""
    theirs, ratio = row["pytorch"], row.get("ratio")
    beside = [row.get("note") or "", "", ""]
    if theirs:
        beside = [torch_options(theirs["options"]), f"{spread(theirs['ms'])}", spread(ratio, ":.2f")]
    return [f"{row['batch_size']:,}", our_options(row["ours"]["options"]), *speed(row["ours"]), *beside]


def variant_cells(row: dict) -> list[str]:
    """A variant, and how its images/s compare with those of the step that was chosen."""
    return [
        f"{row['batch_size']:,}",
        our_options(row["ours"]["options"]),
        *speed(row["ours"]),
        spread(row["ratio"], ":.2f"),
    ]


def start_cells(row: dict) -> list[str]:
    """Seconds to the first update."""
    return [f"{row['batch_size']:,}", f"{row['cold_sec']:.1f}", f"{row['warm_sec']:.1f}"]


def recipe_cells(row: dict) -> list[str]:
    """A run of a recipe."""
    score = f"{row['final_score']:.4f}"
    if row.get("test_score"):
        score += f" (test {row['test_score']:.4f})"
    named = f"`{row['config']}`, seed {row['seed']}" + (f"; {row['note']}" if row.get("note") else "")
    work = [f"{row[name]:,}" for name in ("batch_size", "updates", "images")]
    seconds = [f"{row['train_sec']:,.1f}", f"{row['total_sec']:,.0f}"]
    return [named, *work, score, *seconds, f"{row['images_per_sec']:,.0f}"]


def speed(figures: dict) -> list[str]:
    """Milliseconds of an update and images/s."""
    return [spread(figures["ms"]), f"{figures['images_per_sec']:,.0f}"]


def spread(figure: dict, form: str = ":,.2f") -> str:
    """A median with the least and the most, where they are known."""
    shown = ("{" + form + "}").format
    if "min" not in figure:
        return shown(figure["median"])
    return f"{shown(figure['median'])} ({shown(figure['min'])} to {shown(figure['max'])})"


def our_options(options: dict) -> str:
    """Describe what our step was built with."""
    parts = [f"micro-batch {options['micro_batch_size']:,}", options["storage"], options["conv"], options["dtype"]]
    return ", ".join([*parts, *([f"`XLA_FLAGS={options['xla_flags']}`"] if "xla_flags" in options else [])])


def torch_options(options: dict) -> str:
    """Describe what PyTorch's step was built with."""
    size, stem = options["micro_batch_size"], options.get("stem_channels")
    parts = [f"micro-batch {size or options['batch_size']:,}"]
    parts += [name for name in ("channels_last", "autocast", "compile") if options.get(name)]
    return ", ".join([*parts, *filter(None, [options.get("mode"), stem and f"stem of {stem} channels"])])


def kernel_table(row: dict) -> str:
    """The longest kernels of an update."""
    title = (
        f"Kernels of an update of {row['batch_size']:,} on {machine(row)}, {our_options(row['options'])}: "
        f"{row['ms_per_update']:,.2f} ms in all ({origin(row)})."
    )
    cells = [
        [
            f"{one['ms']:.3f}",
            f"{one['launches']:g}",
            f"`{one['name'][:60]}`",
            f"`{one['hlo']}`" if one["hlo"] else "",
        ]
        for one in row["kernels"][:SHOWN_KERNELS]
    ]
    return f"{title}\n\n{pages.markdown_table(('ms', 'launches', 'kernel', 'operation'), cells)}"


# By section: what stands above its table, the columns, and the cells of a row.
TABLES = {
    "ceilings": ("What the card does at most:", ("device", "what", "rate"), ceiling_cells),
    "step": (
        "The step as `train.py` chooses it, beside PyTorch in its fastest configuration; the network of all is "
        "`convnet` with Adam, and all normalise the images in every update:",
        ("device", "batch", "ours", "ms an update", "images/s", "PyTorch", "its ms", "ours / PyTorch, images/s"),
        step_cells,
    ),
    "variants": (
        "Variants, and their images/s beside those of the step that `train.py` chose:",
        ("device", "batch", "ours", "ms an update", "images/s", "ratio"),
        variant_cells,
    ),
    "start": (
        "Seconds from the start of a process to the end of its first update, with an empty and a filled cache of "
        "programs:",
        ("device", "batch", "cold", "warm"),
        start_cells,
    ),
    "recipes": (
        "Recipes: validation accuracy after the last update; seconds of training, and of the whole run with "
        "compiling, data and validation:",
        ("device", "recipe", "batch", "updates", "images", "accuracy", "training s", "in all s", "images/s"),
        recipe_cells,
    ),
}


def print_measured(result: dict) -> None:
    """Says what was written."""
    print(f"{result['new']} new rows; {len(result['rows'])} in docs/{ROWS.name}, tables in docs/{PAGE.name}")
