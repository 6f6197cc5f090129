"""HFedATM's table on a data set of pictures: client methods x server rules, every domain held out in turn.

command:  python experiments/hfedatm_table.py experiments/pacs.toml --data-dir D [--algorithms fedavg ...] [other options]
          other options are those of `fedjax-dg run`, such as --pretrained, --backbone lenet5 --image-size 32, --dry-run
cost:     that of a `fedjax-dg run` for each client method; can be killed and started again, finished cells are kept
data:     see the configuration; --smoke makes one round of one seed, to see that everything is ready
written:  OUT/<method>/ (run folders) and OUT/table.md; OUT is hfedatm_table/<name of the configuration>
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from fedjax_dg.cli import main
from fedjax_dg.config import RunConfig
from fedjax_dg.tables import markdown, table_title

METHODS = ("fedavg", "fedsr", "fediir")
SMOKE = ["--rounds", "1", "--seeds", "1", "--stations", "2", "--clients-per-station", "2", "--participants", "2"]


def run(config: Path, method: str, folder: Path, options: list[str]) -> dict:
    """Run one method's cells, or what is left of them; its ``result.json``, empty after a dry run."""
    command = ["run", "--config", str(config), "--algorithm", method, "--out", str(folder), *options]
    if (folder / "config.json").exists():
        command.append("--resume")
    if main(command) == 2:
        raise SystemExit(f"{method}: not run")
    return {} if "--dry-run" in options else json.loads((folder / "result.json").read_text())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--algorithms", nargs="+", default=METHODS)
    parser.add_argument("--smoke", action="store_true", help="one round and seed of two stations of two clients")
    arguments, options = parser.parse_known_args()
    out = arguments.out or Path("hfedatm_table") / arguments.config.stem
    options += SMOKE if arguments.smoke else []
    results = [run(arguments.config, method, out / method, options) for method in arguments.algorithms]
    if all(results):
        config = RunConfig(**results[0]["config"])
        text = markdown([cell for result in results for cell in result["cells"]], table_title(config), config.seeds)
        (out / "table.md").write_text(text)
        print(text)
