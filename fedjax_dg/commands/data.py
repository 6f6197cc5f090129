"""``fedjax-dg data list | check | prepare``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro
from rich.box import HEAVY_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedjax_dg import datasets
from fedjax_dg.datasets.checking import check as check_files
from fedjax_dg.datasets.prepare import prepare
from fedjax_dg.progress import CountBar

#: Problems that ``data check`` prints, and classes that its table has columns for.
MOST_PROBLEMS, MOST_CLASSES = 20, 12


@dataclass(frozen=True)
class DataList:
    """List the data sets."""


@dataclass(frozen=True)
class DataCheck:
    """Check a data set on disk: what is there, what should be, every image decoded; exit status 1 for any problem."""

    name: tyro.conf.Positional[str]
    """Data set, see `fedjax-dg data list`."""
    data_dir: str | None = None
    """The folder that holds it, up to three folders above its domains."""
    workers: int = 0
    """Processes that decode; 0 for threads."""
    json: bool = False
    """Print one JSON object."""


@dataclass(frozen=True)
class DataPrepare:
    """Decode and resize a data set of image files once; give the folder as --data-dir afterwards."""

    name: tyro.conf.Positional[str]
    """Data set, see `fedjax-dg data list`."""
    data_dir: str | None = None
    """The folder that holds it, up to three folders above its domains."""
    out: str | None = None
    """Folder to write."""
    format: Literal["uint8", "array_record"] = "uint8"
    """One array that is mapped into memory, or compressed records of tensorflow_datasets."""
    image_size: int = 224
    """Both sides of the images in pixels."""
    workers: int = 0
    """Processes that decode; 0 for threads."""
    overwrite: bool = False
    """Replace a prepared data set with other content."""


DataAction = (
    Annotated[DataList, tyro.conf.subcommand("list")]
    | Annotated[DataCheck, tyro.conf.subcommand("check")]
    | Annotated[DataPrepare, tyro.conf.subcommand("prepare")]
)


def data_command(console: Console):
    def data(action: tyro.conf.OmitSubcommandPrefixes[tyro.conf.OmitArgPrefixes[DataAction]]) -> int:
        """List the data sets, check one on disk, or prepare it for quick reading."""
        if isinstance(action, DataCheck):
            return check_data(action, console)
        if isinstance(action, DataPrepare):
            return prepare_data(action, console)
        for name in datasets.DATASETS:
            console.print(datasets.describe(name), highlight=False)
        return 0

    return data


def check_data(options: DataCheck, console: Console) -> int:
    """``fedjax-dg data check``."""
    with CountBar(console, f"checking {options.name}", quiet=options.json) as report:
        found = check_files(options.name, options.data_dir, options.workers, report)
    if options.json:
        console.print_json(json.dumps(found._asdict() | {"ok": found.ok}))
        return 0 if found.ok else 1
    where = f"in {found.root}" if found.root is not None else "without a folder"
    words = [
        found.name,
        where,
        *([f"({found.layout})"] if found.layout else []),
        *([found.version] if found.version else []),
    ]
    console.print(" ".join(words[:3]) + "".join(f": {word}" for word in words[3:]), highlight=False, markup=False)
    if found.counts:
        console.print(_counts_table(found, console.is_terminal))
    for note in found.notes:
        console.print(f"Note: {note}", highlight=False, markup=False)
    for problem in found.problems[:MOST_PROBLEMS]:
        console.print(f"Problem: {problem}", highlight=False, markup=False)
    if len(found.problems) > MOST_PROBLEMS:
        console.print(f"and {len(found.problems) - MOST_PROBLEMS} more problems; --json gives all", highlight=False)
    console.print("ok" if found.ok else f"{len(found.problems)} problems" if len(found.problems) > 1 else "1 problem")
    return 0 if found.ok else 1


def _counts_table(found, lines: bool) -> Table:
    """Examples by domain, and by class where these are few."""
    header = "domain", *(("expected",) if found.expected else ()), found.unit
    table = Table(*header, box=HEAVY_HEAD if lines else None)
    by_class = len(found.class_names) <= MOST_CLASSES
    for name in found.class_names if by_class else (f"classes with {found.unit}",):
        table.add_column(Text(name), overflow="fold")
    for column in table.columns[1:]:
        column.justify = "right"
    for number, (name, counts) in enumerate(zip(found.domain_names, found.counts, strict=True)):
        expected = [f"{found.expected[number]:,}"] if found.expected else []
        rest = [f"{count:,}" for count in counts] if by_class else [f"{sum(count > 0 for count in counts)}"]
        table.add_row(Text(name), *expected, f"{sum(counts):,}", *rest)
    return table


def prepare_data(options: DataPrepare, console: Console) -> int:
    """``fedjax-dg data prepare``."""
    if options.out is None:
        raise ValueError("No folder to write is given: name it with --out.")
    settings = {name: getattr(options, name) for name in ("format", "image_size", "workers", "overwrite")}
    with CountBar(console, f"preparing {options.name}") as report:
        out = prepare(options.name, options.data_dir, options.out, report=report, **settings)
    console.print(f"Wrote {out}: give it as --data-dir.", highlight=False, soft_wrap=True, markup=False)
    return 0
