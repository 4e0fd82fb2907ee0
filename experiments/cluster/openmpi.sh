#!/usr/bin/env bash
# The image experiment under Open MPI 4 or 5, one node of the graph per process:
#
#   experiments/schedulers/openmpi.sh HOSTFILE --algorithm sgp --epochs 30
#
# from a checkout that all hosts have at the same place, with its environment in .venv. HOSTFILE has
# a line per host, `HOST slots=PROCESSES`, the same number in each. The first host must be reachable
# from all others at port $PORT. Further options go to the experiment.
set -euo pipefail
hostfile=${1:?the file with the hosts, a line HOST slots=PROCESSES for each}
shift
python=${PYTHON:-.venv/bin/python}

hosts=$(grep -cEv '^[[:space:]]*(#|$)' "$hostfile")
first=$(awk '!/^[[:space:]]*(#|$)/ { print $1; exit }' "$hostfile")
slots=$(awk -F 'slots=' '!/^[[:space:]]*(#|$)/ { print (NF > 1) ? $2 + 0 : 1; exit }' "$hostfile")
processes=$((hosts * slots))

# JAX would look for process 0 on the host that mpirun runs on, and under Open MPI 5 not at all.
export GOSSIPJAX_COORDINATOR=${GOSSIPJAX_COORDINATOR:-$first:${PORT:-29500}}

# After SIGTERM Open MPI 4 kills within a second, or these seconds; Open MPI 5 has no such setting.
export OMPI_MCA_odls_base_sigkill_timeout=30

forward=()
for name in PATH PYTHONPATH LD_LIBRARY_PATH "${!GOSSIPJAX_@}" "${!JAX_@}" "${!NCCL_@}" "${!XLA_@}"; do
  if [[ -v $name ]]; then
    forward+=(-x "$name")
  fi
done

# Several processes of a host take one of its GPUs each; a single one takes all.
command=("$python")
if ((slots > 1)); then
  # shellcheck disable=SC2016
  command=(sh -c 'JAX_LOCAL_DEVICE_IDS=$OMPI_COMM_WORLD_LOCAL_RANK exec "$@"' sh "$python")
fi

# By default two processes would be bound to one core each, with all of their threads.
exec mpirun -n "$processes" --hostfile "$hostfile" --map-by "ppr:$slots:node" --bind-to none \
  "${forward[@]}" "${command[@]}" -m experiments.image --nodes "$processes" "$@"
