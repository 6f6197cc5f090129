"""Until fdg.sweep is there."""
import dataclasses, json
from pathlib import Path
from types import SimpleNamespace
from fedjax_dg.config import check
from fedjax_dg.experiment import resolve, run_grid
from fedjax_dg.results import RunFolder

def sweep(config, settings, out=None, resume=False):
    out = Path(out); out.mkdir(parents=True, exist_ok=True)
    cells, lines = [], []
    for n, s in enumerate(settings):
        ro = {k: v for k, v in s.items() if hasattr(config, k) and k != "settings"}
        c = check(dataclasses.replace(config, **ro, settings={**config.settings, **{k: v for k, v in s.items() if k not in ro}}))
        f = RunFolder(out / str(n), c, resume=True)
        got, failed = run_grid(resolve(c), f)
        cells += [{**x, "hparams": dict(s)} for x in got]
        lines += [json.dumps({**json.loads(l), "hparams": dict(s)}) for l in (f.path / "metrics.jsonl").read_text().splitlines()]
    (out / "metrics.jsonl").write_text("\n".join(lines))
    return SimpleNamespace(cells=cells, folder=out)
