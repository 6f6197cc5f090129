"""The form of a client's convolutions: products over tiles, im2col, XLA's own; in the demo's round.

command:  python experiments/benchmarks/convolution.py
cost:     about 2 minutes on 2 CPU cores

Work: a server round of emoji styles, 10 x 10 clients, 5 station rounds, plain averaging, for clients one after another
(chunk 1) and all at once (chunk 0). The forms are timed in turn, --repeats times; printed are medians and ranges of seconds,
and of the ratio to the first form within a repeat. Compilation is not counted.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import jax

import fedjax_dg as fdg
from fedjax_dg.backbones import convolution


def compiled(form: str, chunk: int, federation, backbone, batch_key):
    """The round's program with every convolution in one form, and a call of it."""
    most, im2col = convolution.MOST_FILTERS, convolution.im2col
    if form != "tiles":
        convolution.MOST_FILTERS = 0
    if form == "XLA's":
        convolution.im2col = lambda inputs, kernel, padding, precision, strides: jax.lax.conv_general_dilated(
            inputs, kernel, strides, padding, dimension_numbers=convolution.NHWC, precision=precision
        )
    try:
        round_fn = fdg.make_round(backbone, fdg.algorithms.fedavg(), federation.topology, chunk=chunk)
        state = round_fn.init(batch_key)
        program = jax.jit(round_fn.step).lower(state, federation.data, batch_key).compile()
    finally:
        convolution.MOST_FILTERS, convolution.im2col = most, im2col
    return lambda: jax.block_until_ready(program(state, federation.data, batch_key))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--batch-size", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()

    domains = fdg.datasets.load("emoji_styles")
    backbone = fdg.backbones.lenet5(num_classes=len(domains.class_names))
    federation = fdg.federate(domains, "fluent_mono", station_rounds=5, batch_size=options.batch_size)
    key = jax.random.key(0)
    forms = {
        "tiles, one after another": compiled("tiles", 1, federation, backbone, key),
        "tiles, vmap": compiled("tiles", 0, federation, backbone, key),
        "im2col, one after another": compiled("im2col", 1, federation, backbone, key),
        "XLA's, one after another": compiled("XLA's", 1, federation, backbone, key),
    }
    seconds = {name: [] for name in forms}
    for repeat in range(options.repeats + 1):
        for name, form in forms.items():
            start = time.perf_counter()
            form()
            if repeat:
                seconds[name].append(time.perf_counter() - start)
    print(f"batch {options.batch_size}, {os.cpu_count()} cores, {jax.default_backend()}, jax {jax.__version__}")
    first = next(iter(seconds.values()))
    for name, times in seconds.items():
        ratios = [t / base for t, base in zip(times, first)]
        print(
            f"{name:36s} {statistics.median(times):.2f} s ({min(times):.2f}-{max(times):.2f}) a round, "
            f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        )


if __name__ == "__main__":
    main()
