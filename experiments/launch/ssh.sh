#!/usr/bin/env bash
# One run over machines that you reach by ssh, one process each; the first one writes:
#   bash experiments/launch/ssh.sh "alpha beta" --stations 8 ...
# They need the same environment in the same place, a folder they all see, and PORT (12321) open on the first.
set -euo pipefail
read -r -a hosts <<<"${1:?the machines, such as \"alpha beta\"}"
shift
here="JAX_COORDINATOR_ADDRESS=${hosts[0]}:${PORT:-12321} JAX_NUM_PROCESSES=${#hosts[@]}"
command="cd $(printf %q "$PWD") && ${FEDJAX_DG:-fedjax-dg} run --distributed $(printf '%q ' "$@")"
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
for i in "${!hosts[@]}"; do
    ${SSH:-ssh} "${hosts[$i]}" "export $here JAX_PROCESS_ID=$i; $command" &
done
failed=0
for job in $(jobs -p); do wait "$job" || failed=$?; done
exit "$failed"
