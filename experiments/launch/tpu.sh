#!/usr/bin/env bash
# One run over a Cloud TPU slice, from your own machine:
#   NAME=my-slice ZONE=us-central2-b BUCKET=gs://my-bucket bash experiments/launch/tpu.sh --stations 256 ...
set -euo pipefail
: "${NAME:?name of the TPU VM}" "${ZONE:?its zone}" "${BUCKET:?gs://... for the run folder, mounted on every worker}"
on_every_worker() { gcloud compute tpus tpu-vm ssh "$NAME" --zone "$ZONE" --worker=all --command "$1"; }
case ${1:-} in
setup) # once a slice: the package, and the bucket as a folder that every worker sees
    on_every_worker "python3 -m venv ~/venv && ~/venv/bin/pip install -q 'jax[tpu]' ${PACKAGE:-fedjax-dg}"
    on_every_worker "mkdir -p ~/runs && gcsfuse --implicit-dirs ${BUCKET#gs://} ~/runs"
    ;;
*) on_every_worker "~/venv/bin/fedjax-dg run --distributed --out ~/runs/$NAME $(printf '%q ' "$@")" ;;
esac
