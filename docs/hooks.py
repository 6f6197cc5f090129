"""What pages show is made of the code when they are built: help texts, tables of methods, sections of the README.

A page asks for it by a line ``<!-- help: run -->``, ``<!-- algorithms -->``, ``<!-- aggregators -->``, ``<!-- datasets -->``
or ``<!-- readme: A heading -->``.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import re
from pathlib import Path
from typing import Any

from fedjax_dg import datasets
from fedjax_dg.aggregators import AGGREGATORS
from fedjax_dg.algorithms import ALGORITHMS
from fedjax_dg.config import aggregator_options, algorithm_options

ROOT = Path(__file__).parent.parent


def on_page_markdown(markdown: str, **rest: Any) -> str:
    """Replace what a page asks for."""
    return re.sub(
        r"^<!-- ([a-z]+)(?:: (.*?))? -->$", lambda m: MAKERS[m[1]](*([m[2]] if m[2] else [])), markdown, flags=re.M
    )


def help_of(command: str) -> str:
    """The help text of a command, as a terminal shows it."""
    from fedjax_dg.cli import main

    with plain_terminal(), contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        main([*command.split(), "--help"])
    return f"```text\n{out.getvalue().strip()}\n```"


@contextlib.contextmanager
def plain_terminal():
    """The width of a page, and no colours."""
    kept = {name: os.environ.get(name) for name in ("COLUMNS", "NO_COLOR", "TERM")}
    os.environ.update(COLUMNS="110", NO_COLOR="1", TERM="dumb")
    try:
        yield
    finally:
        for name, value in kept.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def methods(table: dict[str, Any], options: Any) -> str:
    """Name, what it does in a line, and what ``--set`` changes of it, of every entry."""
    lines = ["| name | what it does | `--set`, defaults |", "| --- | --- | --- |"]
    for name, factory in table.items():
        told = " ".join((inspect.getdoc(factory) or "").split("\n\n")[0].split())
        told = re.sub(r" ?Source:.*", "", told).replace("``", "`").replace("|", "\\|")
        defaults = ", ".join(f"`{k}={v}`" for k, v in options(name).items())
        lines.append(f"| `{name}` | {told} | {defaults} |")
    return "\n".join(lines)


def datasets_table() -> str:
    """What ``fedjax-dg data list`` prints."""
    told = "\n".join(datasets.describe(name) for name in datasets.DATASETS)
    return f"```text\n{told}\n```"


def readme(heading: str) -> str:
    """The text below a heading of the README; its links to files, which the site does not have, as names."""
    text = (ROOT / "README.md").read_text()
    found = re.search(rf"^(#+) {re.escape(heading)}\n(.*?)(?=^#{{1,2}} |\Z)", text, re.M | re.S)
    if found is None:
        raise ValueError(f"README.md has no heading {heading!r}: correct the page that asks for it.")
    body = re.sub(r"^!\[.*?\]\(.*?\)\n", "", found[2], flags=re.M)
    body = re.sub(r"\[([^\]]*)\]\((?!http)#[^)]*\)", r"\1", body)
    return re.sub(r"\[([^\]]*)\]\((?!http)([^)]*)\)", lambda m: m[1] if m[1] == m[2] else f"{m[1]} (`{m[2]}`)", body)


MAKERS = {
    "help": help_of,
    "algorithms": lambda: methods(ALGORITHMS, algorithm_options),
    "aggregators": lambda: methods(AGGREGATORS, aggregator_options),
    "datasets": datasets_table,
    "readme": readme,
}
