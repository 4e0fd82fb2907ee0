#!/usr/bin/env bash
# The image experiment on a Cloud TPU slice of several hosts, one node of the graph per chip:
#
#   TPU=my-slice ZONE=europe-west4-b REPOSITORY=https://... experiments/cluster/tpu_pod.sh \
#     --nodes 32 --algorithm sgp --epochs 30
#
# It needs gcloud, logged in, with a project. --nodes is the number of JAX devices of the slice; JAX
# detects the hosts. Further options are passed to the experiment. Create and delete a slice with:
#
#   gcloud compute tpus tpu-vm create my-slice --zone=europe-west4-b \
#     --accelerator-type=v5litepod-32 --version=v2-alpha-tpuv5-lite
#   gcloud compute tpus tpu-vm delete my-slice --zone=europe-west4-b
set -euo pipefail
: "${TPU:?name of the slice}" "${ZONE:?zone of the slice}" "${REPOSITORY:?git URL of gossipjax}"
out=${OUT:-runs/tpu} # with --checkpoint-every: a folder that all hosts see (Filestore, NFS)

on_all_hosts() { gcloud compute tpus tpu-vm ssh "$TPU" --zone="$ZONE" --worker=all --command="$1"; }

# uv installs Python 3.11; that of the slice's image may be older.
on_all_hosts "set -e
  test -d gossipjax || git clone -q $(printf %q "$REPOSITORY") gossipjax
  cd gossipjax
  test -x .venv/bin/python && exit
  curl -LsSf https://astral.sh/uv/install.sh | sh
  ~/.local/bin/uv venv -q --python 3.11
  ~/.local/bin/uv pip install -q -e '.[experiments]' 'jax[tpu]'"

# The same command on every host, at the same time. If it fails on one of them, JAX ends the others
# within two minutes.
on_all_hosts "cd gossipjax && .venv/bin/python -m experiments.image --out $(printf %q "$out") $(
  printf '%q ' "$@"
)"

# Process 0, which writes the results, runs on worker 0.
gcloud compute tpus tpu-vm scp --recurse --worker=0 --zone="$ZONE" \
  "$TPU:gossipjax/$out" "$(basename "$out")"
