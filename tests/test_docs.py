"""What the documentation shows is what runs: commands are parsed, Python is executed, the "how to add" pages are followed.

A block ``python`` is executed; ``py`` is shown, and only compiled, as it would train for long.
"""

import dataclasses
import functools
import importlib.util
import inspect
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import tyro

import fedjax_dg as fdg
from fedjax_dg import cli
from fedjax_dg.aggregators import AGGREGATORS
from fedjax_dg.algorithms import ALGORITHMS
from fedjax_dg.backbones import BACKBONES
from fedjax_dg.cli import main
from fedjax_dg.config import RunConfig, check, parse_settings
from fedjax_dg.datasets import DATASETS, SUMMARIES
from fedjax_dg.experiment import resolve

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = {str(path.relative_to(ROOT)): path for path in [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]}
SHOWN = ("run", "sweep", "table", "plot", "report", "export", "data", "traffic")


def blocks(page, *languages):
    """(title, code) of a page's fenced blocks in these languages."""
    found = re.findall(r"^```(\w*)(?: title=\"(.*?)\")?\n(.*?)^```$", PAGES[page].read_text(), re.M | re.S)
    return [(title, code) for language, title, code in found if language in languages]


def commands(page):
    """The ``fedjax-dg`` lines of a page's blocks, and those within its text, as lists of words; those of ``SHOWN``."""
    text = PAGES[page].read_text()
    lines = [line for _, code in blocks(page, "") for line in code.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"`(fedjax-dg [^`]* --[^`]+)`", text)  # others only name a command
    words = [shlex.split(line, comments=True) for line in lines if line.startswith("fedjax-dg")]
    return [line[1:] for line in words if "COMMAND" not in line]


def parsed(arguments):
    """What a command line asks for, as the command's arguments; nothing is run. ``SystemExit`` for what cannot be parsed."""
    asked = []
    real = tyro.extras.subcommand_cli_from_dict

    def only_parsing(table, **options):
        def instead_of(command):
            @functools.wraps(command)
            def told(*args, **kwargs):
                asked.extend([*args, *kwargs.values()])
                return 0

            return told

        return real({name: instead_of(command) for name, command in table.items()}, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tyro.extras, "subcommand_cli_from_dict", only_parsing)
        assert main(arguments) == 0, arguments
    return asked


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder where the files are that commands name: the experiments' and those that a page shows."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "experiments").symlink_to(ROOT / "experiments")
    for page in PAGES:
        for title, code in blocks(page, "toml"):
            if title:
                (folder / title).write_text(code)
    return folder


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page) and "add_" not in page])
def test_every_command_can_be_given(page, place, monkeypatch):
    monkeypatch.chdir(place)
    give_commands(page)


def give_commands(page):
    """Its options exist, its values have the right types, and what a run names exists and fits together."""
    for arguments in commands(page):
        for option in parsed(arguments):
            if isinstance(option, RunConfig):
                settings = option.settings | parse_settings(option.set)
                check(dataclasses.replace(cli._config(option), settings=settings))


def test_a_wrong_command_would_be_found(capsys):
    with pytest.raises(SystemExit):
        parsed(["run", "--held-outt", "noto"])
    assert "held-out" in capsys.readouterr().err


def test_commands_are_found():
    """In blocks and in text, over several lines."""
    found = [line for page in PAGES for line in commands(page)]
    assert len(found) > 50 and {line[0] for line in found} == set(SHOWN)
    assert [line for line in found if "--freeze-encoder" in line and "--client-optimizer" in line]


@pytest.mark.parametrize("page", [page for page in PAGES if page != "README.md"])
def test_links_lead_to_pages(page):
    for link in re.findall(r"\]\((?!http)([^)#]+)(?:#[^)]*)?\)", PAGES[page].read_text()):
        assert (PAGES[page].parent / link).exists(), link


def test_every_page_is_in_the_navigation():
    nav = (ROOT / "mkdocs.yml").read_text().partition("nav:")[2]
    for page in PAGES:
        if page != "README.md":
            assert f"- {page.removeprefix('docs/')}\n" in nav, page


def test_every_complaint_has_its_answer():
    numbers = re.findall(r"^\*\*(\d+)\. ", PAGES["docs/answers.md"].read_text(), re.M)
    assert numbers == [str(number) for number in range(1, 22)]


def test_parts_that_are_made_of_the_code():
    spec = importlib.util.spec_from_file_location("hooks", DOCS / "hooks.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    made = {name: hooks.on_page_markdown(PAGES[f"docs/{name}.md"].read_text()) for name in ("methods", "data", "cli")}
    assert not [name for name, text in made.items() if "<!--" in text]
    for name in (*ALGORITHMS, *AGGREGATORS):
        assert f"| `{name}` | " in made["methods"]
    assert all(f"\n{name}: " in made["data"] for name in DATASETS)
    for option in dataclasses.fields(cli.RunOptions):
        assert option.name == "settings" or f"--{option.name.replace('_', '-')}" in made["cli"], option.name
    with pytest.raises(ValueError, match="README.md has no heading 'Nothing'"):
        hooks.readme("Nothing")


# --- Python ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def tables():
    """What pages add to the library's tables is gone afterwards."""
    kept = [(table, dict(table)) for table in (ALGORITHMS, AGGREGATORS, BACKBONES, DATASETS, SUMMARIES)]
    yield
    for table, before in kept:
        table.clear()
        table.update(before)


def follow(page):
    """Execute a page from top to bottom, as one module; its names."""
    names = {"__name__": Path(page).stem}
    for title, code in blocks(page, "python"):
        exec(compile(code, f"{page}: {title or 'example'}", "exec"), names)
    return names


@pytest.mark.parametrize("page", ["docs/concepts.md", "docs/devices.md", "docs/logging.md"])
def test_examples_run(page, monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert follow(page)


@pytest.mark.slow
def test_the_quickstart_runs(full_optimization, capsys):
    history = follow("docs/quickstart.md")["history"]
    out = capsys.readouterr().out
    assert len(history) == 2 and "round 2 of 2" in out and f"2 {history[1]['train_loss']}" in out


def test_long_examples_would_run(monkeypatch):
    """The first page's up to its training, whose arguments fit."""
    monkeypatch.setattr(fdg, "run", lambda *a, **k: (inspect.signature(real).bind(*a, **k).args[0], []))
    real = sys.modules["fedjax_dg.run"].run
    ((_, code),) = blocks("docs/index.md", "py")
    names = {}
    exec(code, names)
    assert isinstance(names["state"], fdg.Round)
    for page in PAGES:
        for title, code in blocks(page, "py"):
            compile(code, f"{page}: {title}", "exec")


def contract(*names, slow=False):
    """The checks of ``tests/contract`` that a page names, for one algorithm and aggregator."""
    from contract import test_contract as tests

    tests.test_a_round_returns_a_state_of_the_same_types(names)
    tests.test_a_round_never_calls_the_host(names)
    if slow:
        tests.test_a_run_compiles_once(names)
        tests.test_padding_is_never_read(names)
        tests.test_a_run_goes_on_from_a_saved_state(names)
        tests.test_places_of_clients_do_not_matter(names)
        tests.test_three_rounds_in_one_block_all_clients_at_once(names)
        tests.test_hyper_parameters_side_by_side(names)
        tests.test_three_rounds_spread_over_devices(names, (2, 4))


def test_how_to_add_an_algorithm(tables):
    follow("docs/add_algorithm.md")
    give_commands("docs/add_algorithm.md")
    contract("smoothing", "mean")
    assert check(RunConfig(algorithm="smoothing", settings={"share": "0.2"})).settings == {"share": 0.2}


@pytest.mark.slow
def test_the_algorithm_that_was_added_keeps_the_contract(tables):
    follow("docs/add_algorithm.md")
    for rule in ("mean", "hfedatm"):
        contract("smoothing", rule, slow=True)


def test_how_to_add_an_aggregator(tables):
    follow("docs/add_aggregator.md")
    give_commands("docs/add_aggregator.md")
    contract("fedavg", "closeness")
    config = check(RunConfig(aggregator="mean,closeness", station_aggregator="closeness", settings={"sharpness": "2"}))
    assert config.settings == {"sharpness": 2.0}


@pytest.mark.slow
def test_the_aggregator_that_was_added_keeps_the_contract(tables):
    follow("docs/add_aggregator.md")
    for algorithm in ("fedavg", "scaffold"):
        contract(algorithm, "closeness", slow=True)


def test_how_to_add_a_backbone(tables):
    smallnet = follow("docs/add_backbone.md")["smallnet"]
    give_commands("docs/add_backbone.md")
    with pytest.raises(ValueError, match="smallnet takes images of at least 4 x 4 pixels"):
        smallnet(5, image_size=3)


@pytest.mark.slow
def test_the_backbone_that_was_added_can_be_permuted(tables, monkeypatch):
    import test_permutation as tests

    smallnet = follow("docs/add_backbone.md")["smallnet"]
    monkeypatch.setitem(tests.NETS, "smallnet", lambda: smallnet(5, image_size=8))
    with jax.enable_x64(True):
        case = tests.build("smallnet", "thin")
        tests.test_permuting_every_group_keeps_the_function(case)
        tests.test_leaving_one_leaf_behind_changes_the_function(case)


def test_how_to_add_a_data_set(tables, capsys):
    follow("docs/add_dataset.md")
    give_commands("docs/add_dataset.md")
    assert main(["data", "list"]) == 0
    assert "stripes: 480 examples\n  3 domains: red, green, blue\n" in capsys.readouterr().out
    config = check(RunConfig(dataset="stripes", held_out="blue", stations=2, clients_per_station=2, seeds=1))
    grid = resolve(config)
    assert grid.domains.domain_names == ("red", "green", "blue") and np.unique(grid.domains.labels).size == 4


# --- the site --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "fedjax_dg.algorithms.fedprox" in (tmp_path / "api/algorithms/index.html").read_text()
    assert "--dry-run" in (tmp_path / "cli/index.html").read_text()
