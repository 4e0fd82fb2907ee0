#!/usr/bin/env bash
# The image experiment under Open MPI 4 or 5, one node of the graph per process:
#
#   experiments/cluster/openmpi.sh HOSTFILE --algorithm sgp --epochs 30
#
# Run it from a checkout that has the same path on all hosts, with its environment in .venv.
# HOSTFILE has one line per host, `HOST slots=PROCESSES`, with the same number for each host. All
# hosts must reach the first one at port $PORT. Further options are passed to the experiment.
set -euo pipefail
hostfile=${1:?a file of hosts, one line HOST slots=PROCESSES for each}
shift
python=${PYTHON:-.venv/bin/python}

hosts=$(grep -cEv '^[[:space:]]*(#|$)' "$hostfile")
first=$(awk '!/^[[:space:]]*(#|$)/ { print $1; exit }' "$hostfile")
slots=$(awk -F 'slots=' '!/^[[:space:]]*(#|$)/ { print (NF > 1) ? $2 + 0 : 1; exit }' "$hostfile")
processes=$((hosts * slots))

# JAX would expect process 0 on the host of mpirun, and under Open MPI 5 it detects nothing.
export GOSSIPJAX_COORDINATOR_ADDRESS=${GOSSIPJAX_COORDINATOR_ADDRESS:-$first:${PORT:-29500}}
# With it asynchronous nodes encrypt; those in lockstep do not use it.
export GOSSIPJAX_SECRET=${GOSSIPJAX_SECRET:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}

# Seconds from SIGTERM to SIGKILL for Open MPI 4 (default: 1). Open MPI 5 has no such setting.
export OMPI_MCA_odls_base_sigkill_timeout=30

forward=()
for name in PATH PYTHONPATH LD_LIBRARY_PATH "${!GOSSIPJAX_@}" "${!JAX_@}" "${!NCCL_@}" "${!XLA_@}"; do
  if [[ -v $name ]]; then
    forward+=(-x "$name")
  fi
done

# A process uses one GPU. For all GPUs of a host: slots=1, and JAX_LOCAL_DEVICE_IDS=0,1,2,3,4,5,6,7.
# --bind-to none: two processes would be bound to one core each, with all of their threads.
exec mpirun -n "$processes" --hostfile "$hostfile" --map-by "ppr:$slots:node" --bind-to none \
  "${forward[@]}" "$python" -m experiments.image --nodes "$processes" "$@"
