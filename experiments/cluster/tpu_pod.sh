#!/usr/bin/env bash
# The image experiment on a Cloud TPU slice of several hosts, one node of the graph per chip:
#
#   TPU=my-slice ZONE=europe-west4-b REPOSITORY=https://... experiments/schedulers/tpu_pod.sh \
#     --nodes 32 --algorithm sgp --epochs 30
#
# Needs gcloud, logged in, with a project. --nodes is the number of JAX devices of the slice; JAX
# finds the hosts. Further options go to the experiment. Make and delete the slice like this:
#
#   gcloud compute tpus tpu-vm create my-slice --zone=europe-west4-b \
#     --accelerator-type=v5litepod-32 --version=v2-alpha-tpuv5-lite
#   gcloud compute tpus tpu-vm delete my-slice --zone=europe-west4-b
set -euo pipefail
: "${TPU:?the name of the slice}" "${ZONE:?its zone}" "${REPOSITORY:?a git URL of gossipjax}"
out=${OUT:-runs/tpu} # with --checkpoint-every, a folder that all hosts see (Filestore, NFS)

on_all_hosts() { gcloud compute tpus tpu-vm ssh "$TPU" --zone="$ZONE" --worker=all --command="$1"; }

# uv brings a Python of its own; that of the slice's image may be older than 3.11.
on_all_hosts "set -e
  test -d gossipjax || git clone -q $(printf %q "$REPOSITORY") gossipjax
  cd gossipjax
  test -x .venv/bin/python && exit
  curl -LsSf https://astral.sh/uv/install.sh | sh
  ~/.local/bin/uv venv -q --python 3.11
  ~/.local/bin/uv pip install -q -e '.[experiments]' 'jax[tpu]'"

# The same command on every host, at the same time. An error on one of them ends the others when JAX
# misses it, within two minutes.
on_all_hosts "cd gossipjax && .venv/bin/python -m experiments.image --out $(printf %q "$out") $(
  printf '%q ' "$@"
)"

# Process 0, which writes the results, runs on worker 0.
gcloud compute tpus tpu-vm scp --recurse --worker=0 --zone="$ZONE" \
  "$TPU:gossipjax/$out" "$(basename "$out")"
