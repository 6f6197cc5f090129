"""Tables and plots of what ``hfedatm_regimes.py`` computed; works on whatever is finished.

command:  python experiments/hfedatm_regimes_report.py --out regimes
cost:     half a minute
written:  report.md, map.png and .svg (one merge, alpha x ridge), runs.png and .svg (complete runs)

Every number is a difference to averaging in points, on identical station models (one merge) or from the same start with the
same draws (runs): mean over styles, then mean and 95 % t interval over seeds; bold where the interval leaves zero out. With
n intervals some n / 20 do so by chance.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from pathlib import Path
from typing import Any

import numpy as np
from hfedatm_regimes import ALPHAS, CASES, MIXES, RIDGES, RULES, STATION_ROUNDS, STEPS, STYLES, Cell, read_cells
from matplotlib import pyplot
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from scipy import stats

from fedjax_dg.tables import interval

PAPER = (ALPHAS.index(0.75), RIDGES.index(1e-6))
HELD_OUT, SOURCE, TRAIN = 0, 1, 2  # places of the accuracies among the scores
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")  # told apart by colour-blind readers


def points(found: dict[Cell, dict[str, Any]]) -> list[tuple[tuple, str, int, dict[str, Any]]]:
    """(regime, style, seed, numbers) of every merge, and of every complete run with that of averaging beside it."""
    out = []
    for cell, entry in found.items():
        if cell.rule not in ("", "mean") and (twin := cell._replace(rule="mean")) in found:
            ours, theirs = entry["halves"][-1], found[twin]["halves"][-1]
            pair = {"averaging": theirs["scores"], "rule": ours["scores"], "sizes": (theirs["size"], ours["size"])}
            out.append(
                (
                    ("run", cell.rule, cell.federation, cell.start, cell.mix, cell.station_rounds),
                    cell.held_out,
                    cell.seed,
                    pair,
                )
            )
        for n in STATION_ROUNDS if cell.part == "merge" else ():
            row = entry[str(n)]
            both, gram = row["rule"]["fot-sum"], row["gram"]["dense1"]
            alone = row["rule"].get("plain-sum", both)  # without it, FOT left every filter in place
            of_mean = row["rule"].get("plain-mean", row["rule"].get("fot-mean", alone))
            numbers = {
                "averaging": alone["mean"],
                "regmean": alone["regmean"],
                "FOT": both["mean"],
                "both": both["regmean"],
                "mean-Grams": of_mean["regmean"],
                "larger": alone["larger"],
                "filters FOT left": min(both["identity"].values()),
                "conv2 spread": row["spread"]["params/conv2/kernel"],
                "dense1 spread": row["spread"]["params/dense1/kernel"],
                "Grams unlike": gram["unlike"],
                "rank of a station": gram["rank"][1],
                "rank of the sum": gram["rank"][0],
                "effective rank": gram["effective"][0],
                "step, paper": alone["step"][PAPER[0]][PAPER[1]],
                "step, ridge 10": alone["step"][PAPER[0]][-1],
                "moved, paper": alone["moved"][PAPER[0]][PAPER[1]],
                "moved, ridge 10": alone["moved"][PAPER[0]][-1],
            }
            out.append(((cell.federation, cell.start, cell.mix, n), cell.held_out, cell.seed, numbers))
    return out


def stack(rows: list[tuple]) -> dict[tuple, dict[str, np.ndarray]]:
    """By regime and name: [style, seed, ...], of the seeds that have every style."""
    out = {}
    for regime in dict.fromkeys(row[0] for row in rows):
        here = {row[1:3]: row[3] for row in rows if row[0] == regime}
        styles = [style for style in STYLES if any(style == s for s, _ in here)]
        seeds = [n for n in sorted({n for _, n in here}) if all((style, n) in here for style in styles)]
        names = here[styles[0], seeds[0]] if seeds else ()
        out[regime] = {k: np.array([[here[style, n][k] for n in seeds] for style in styles]) for k in names}
    return {regime: numbers for regime, numbers in out.items() if numbers}


def gain(scores: np.ndarray, base: np.ndarray, which: int = HELD_OUT) -> np.ndarray:
    """Difference in points of one of the scores: [style, seed, ...]."""
    return 100 * (scores - np.expand_dims(base, tuple(range(2, scores.ndim - 1))))[..., which]


def is_sure(found: dict[str, Any]) -> bool:
    return found["ci95"] is not None and abs(found["mean"]) > found["ci95"]


def text(values: np.ndarray, sign: str = "+") -> str:
    """Mean and interval over seeds of the mean over styles."""
    found = interval(values.mean(0))
    words = f"{found['mean']:{sign}.1f}" + (f" ± {found['ci95']:.1f}" if found["ci95"] is not None else "")
    return f"**{words}**" if sign and is_sure(found) else words


def verdicts(differences: list[np.ndarray]) -> list[int]:
    """Of all (regime, style): how many are significantly better, significantly worse, and how many there are."""
    sure = [(found := interval(style))["mean"] * is_sure(found) for d in differences for style in d]
    return [sum(x > 0 for x in sure), sum(x < 0 for x in sure), len(sure)]


def write_report(found: dict[Cell, dict[str, Any]], folder: Path) -> None:
    """``report.md`` and the two plots."""
    everything = stack(points(found))
    place = lambda k: (CASES.index(k[:2]), list(MIXES).index(k[2]), k[3])
    merges = {k: everything[k] for k in sorted((k for k in everything if k[0] != "run"), key=place)}
    runs = {k[1:]: everything[k] for k in sorted(k for k in everything if k[0] == "run")}
    shared = {k: m for k, m in merges.items() if k[1] != "independent"}
    lines = []

    def table(title, head, rows):
        body = ["| " + " | ".join(str(x) for x in row) + " |" for row in (head, ["---"] * len(head), *rows)]
        lines.append(f"## {title}\n\n" + "\n".join(body))

    def gains(m, name="regmean", which=HELD_OUT):  # [style, seed, alpha, ridge]
        return gain(m[name], m["averaging"], which)

    averaging = lambda m: text(100 * m["averaging"][..., HELD_OUT], "")
    where = ["federation", "start", "stations", "station rounds"]

    shown = {"paper": PAPER, "alpha 0": (0, 0), "alpha 1": (4, 0)}
    shown |= {f"alpha 0.75, ridge {r:g}": (PAPER[0], i) for i, r in enumerate(RIDGES) if i}
    rows = []
    for k, m in merges.items():
        larger = gains(m, "larger")[..., STEPS.index(2.0)]
        by_setting = [text(gains(m)[:, :, i, j]) for i, j in shown.values()]
        rows.append([*k, m["averaging"].shape[1], averaging(m), *by_setting, text(larger)])
    table(
        "One merge: RegMean minus averaging", [*where, "seeds", "averaging", *shown, "averaging, server step 2"], rows
    )

    rows = []
    for i, j in itertools.product(range(len(ALPHAS)), range(len(RIDGES))):
        one = [gains(m)[:, :, i, j] for m in shared.values()]
        others = [
            np.mean([gains(m, which=which)[:, :, i, j].mean() for m in shared.values()]) for which in (SOURCE, TRAIN)
        ]
        means = [d.mean() for d in one]
        spans = [f"{x:+.2f}" for x in (np.mean(means), min(means), max(means), *others)]
        rows.append([ALPHAS[i], f"{RIDGES[j]:g}", *spans, *verdicts(one)])
    head = ["alpha", "ridge", "mean", "worst regime", "best regime", "source validation", "clients' examples"]
    title = "One merge from a shared basis, every setting (better, worse: significantly, of regime x style)"
    table(title, [*head, "better", "worse", "of"], rows)

    rows = []
    for k, m in merges.items():
        if (m["filters FOT left"] < 1).any():
            dense = [
                text(gains(m, name)[:, :, i, j]) for i, j in (PAPER, (PAPER[0], 3)) for name in ("regmean", "both")
            ]
            rows.append([*k, averaging(m), text(gains(m, "FOT")), *dense])
    head = [*where, "averaging", "FOT", "RegMean, paper", "both, paper", "RegMean, ridge 1", "both, ridge 1"]
    table("Each part alone, wherever FOT moved a filter", head, rows)

    rows = []
    for k, m in merges.items():
        for j, ridge in enumerate(RIDGES) if k[0] == "uneven" else ():
            both = [gains(m, name)[:, :, PAPER[0], j] for name in ("regmean", "mean-Grams")]
            rows.append([*k, f"{ridge:g}", *(text(x) for x in (*both, both[1] - both[0]))])
    title = "Stations whose clients hold 6 or some 25 examples: sum-Grams against mean-Grams (alpha 0.75)"
    table(title, [*where, "ridge", "sum", "mean", "mean minus sum"], rows)

    reasons = list(next(iter(merges.values())))[6:]
    rows = [[*k, *(f"{m[name].mean():.3g}" for name in reasons)] for k, m in merges.items()]
    table(
        "Why: how far stations are apart, how full their Grams are (dense1 reads 400 inputs)", [*where, *reasons], rows
    )
    flat = lambda read: np.concatenate([read(m).ravel() for m in shared.values()])
    paper = flat(lambda m: gains(m)[:, :, PAPER[0], PAPER[1]])
    others = {name: flat(lambda m, name=name: m[name]) for name in reasons[1:]}
    others |= {"averaging's accuracy": flat(lambda m: m["averaging"][..., HELD_OUT])}
    others |= {
        f"gain of server step {s:g}": flat(lambda m, i=i: gains(m, "larger")[..., i]) for i, s in enumerate(STEPS)
    }
    words = ", ".join(f"{name} {stats.spearmanr(x, paper)[0]:+.2f}" for name, x in others.items())
    lines.append(f"Rank correlation of the paper's gain, over {len(paper)} merges, with: {words}.")

    rows = []
    for k, m in runs.items():
        difference = functools.partial(gain, m["rule"], m["averaging"])
        by_style = [text(style[None]) for style in difference()]
        sizes = "{:.1f}, {:.1f}".format(*m["sizes"].mean((0, 1)))
        three = [text(difference(which)) for which in (HELD_OUT, SOURCE, TRAIN)]
        rows.append([*k, m["averaging"].shape[1], averaging(m), *three, *by_style, sizes])
    head = [
        "rule",
        *where,
        "seeds",
        "averaging",
        "held-out styles",
        "source validation",
        "clients' examples",
    ]
    table(
        "Complete runs: rule minus averaging",
        [*head, *STYLES, "norm of dense1: averaging, rule"],
        rows,
    )
    for rule in dict.fromkeys(k[0] for k in runs):
        counts = verdicts([gain(m["rule"], m["averaging"]) for k, m in runs.items() if k[0] == rule])
        lines.append("{}: significantly better in {}, worse in {} of {} (regime x style).".format(rule, *counts))
    names = ", ".join(f"{n} (alpha {r[0]:g}, ridge {r[1]:g})" for n, r in RULES.items() if isinstance(r, tuple))
    lines.append(f"Rules: {names}; step 2 is averaging with a server step of 2.")
    (folder / "report.md").write_text("\n\n".join(lines) + "\n")
    draw_map(merges, folder / "map")
    draw_runs(runs, folder / "runs")


def draw_map(merges: dict, path: Path) -> None:
    """Heat maps alpha x ridge of what one merge gains."""
    cases = list(dict.fromkeys(k[:2] for k in merges))
    columns = list(itertools.product(MIXES, STATION_ROUNDS))
    size = {"figsize": (11, 1.6 * len(cases) + 0.8), "layout": "constrained"}
    figure, axes = pyplot.subplots(len(cases), len(columns), squeeze=False, sharex=True, sharey=True, **size)
    colors = ScalarMappable(Normalize(-6, 6), "PuOr")
    for (r, case), (c, column) in itertools.product(enumerate(cases), enumerate(columns)):
        if (here := merges.get((*case, *column))) is None:
            continue
        d = gain(here["both" if case[1] == "independent" else "regmean"], here["averaging"]).mean(0)
        axes[r, c].imshow(d.mean(0), cmap=colors.cmap, norm=colors.norm, aspect="auto", origin="lower")
        for i, j in itertools.product(range(len(ALPHAS)), range(len(RIDGES))):
            found = interval(d[:, i, j])
            look = {
                "color": "white" if abs(found["mean"]) > 4 else "black",
                "weight": "bold" if is_sure(found) else "normal",
            }
            axes[r, c].text(j, i, f"{found['mean']:+.1f}", ha="center", va="center", fontsize=6, **look)
        axes[r, c].set_xticks(range(len(RIDGES)), [f"{x:g}" for x in RIDGES], fontsize=6)
        axes[r, c].set_yticks(range(len(ALPHAS)), [f"{x:g}" for x in ALPHAS], fontsize=6)
    for axis, (mix, n) in zip(axes[0], columns):
        axis.set_title(f"{mix}, {n} station round{'s' * (n > 1)}", fontsize=8)
    for axis, case in zip(axes[:, 0], cases):
        axis.set_ylabel(f"{case[0]}, {case[1]}\nalpha", fontsize=8)
    for axis in axes[-1]:
        axis.set_xlabel("ridge", fontsize=7)
    bar = figure.colorbar(colors, ax=axes, shrink=0.5, pad=0.01)
    bar.set_label("one merge by RegMean minus averaging: points on the held-out style", fontsize=7)
    bar.ax.tick_params(labelsize=7)
    for suffix in (".png", ".svg"):
        figure.savefig(path.with_suffix(suffix), dpi=200)


def draw_runs(runs: dict, path: Path) -> None:
    """What complete runs gain: the mean over styles with its interval over seeds, each style as a small mark."""
    figure, axis = pyplot.subplots(figsize=(9, 3.4), layout="constrained")
    regimes = sorted({k[1:] for k in runs})
    rules = [rule for rule in RULES if any(k[0] == rule for k in runs)]
    for r, (rule, marker, color) in enumerate(zip(rules, "osD^", COLORS)):
        here = {regimes.index(k[1:]): gain(m["rule"], m["averaging"]) for k, m in runs.items() if k[0] == rule}
        places = np.array(list(here)) + 0.2 * (r - (len(rules) - 1) / 2)
        found = [interval(d.mean(0)) for d in here.values()]
        means, halves = [f["mean"] for f in found], [f["ci95"] or 0.0 for f in found]
        axis.errorbar(places, means, halves, fmt=marker, color=color, capsize=3, markersize=5, label=rule)
        for x, d in zip(places, here.values()):
            axis.scatter(
                [x + 0.07] * len(d), d.mean(1), s=9, marker=marker, facecolors="none", edgecolors=color, linewidths=0.7
            )
    axis.axhline(0, color="black", linewidth=0.8)
    axis.set_xticks(range(len(regimes)), ["{}, {}\n{}, {}".format(*k) for k in regimes], fontsize=8)
    axis.set_ylabel("rule minus averaging:\npoints on the held-out style", fontsize=8)
    axis.legend(fontsize=8, frameon=False)
    for suffix in (".png", ".svg"):
        figure.savefig(path.with_suffix(suffix), dpi=200)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("regimes"))
    folder = parser.parse_args().out
    write_report(read_cells(folder / "cells.jsonl"), folder)


if __name__ == "__main__":
    main()
