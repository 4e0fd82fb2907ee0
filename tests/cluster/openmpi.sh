#!/usr/bin/env bash
# Under a real mpirun, with 4 processes on this machine: the processes find their job, a failure
# ends it, SIGTERM arrives, and the image experiment trains. As root on Debian this installs Open
# MPI; the exit status is 77 if it is not available.
#
#   tests/cluster/openmpi.sh .venv/bin/python
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
command -v mpirun >/dev/null || install_debian openmpi-bin
mpirun --version | head -n 1
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
free_port=$("$python" -c 'import socket; s = socket.create_server(("", 0)); print(s.getsockname()[1])')
four=(mpirun -n 4 --oversubscribe "$python" tests/cluster/program.py)
out=$TMPDIR/exit.out

if [[ $(mpirun --version) == *" 4."* ]]; then
  say 'Open MPI 4: JAX detects the job'
else
  say 'Open MPI 5: process numbers from Open MPI, the coordinator from this script'
  export GOSSIPJAX_COORDINATOR_ADDRESS=127.0.0.1:$free_port
fi
within 120 "${four[@]}" exit >"$out" 2>&1 || fail "mpirun: exit status $?"
expect 4 'of 4: averaged' "$out"

say 'a process that fails ends the others'
out=$TMPDIR/failure.out
status=0
within 90 "${four[@]}" fail >"$out" 2>&1 || status=$?
((status == 1)) || fail "exit status $status"
expect 1 'RuntimeError: as asked for' "$out"

say 'SIGTERM arrives'
out=$TMPDIR/sigterm.out
"${four[@]}" wait >"$out" 2>&1 &
job=$!
wait_for 90 has 4 averaged "$out" || fail 'the processes did not start'
sleep 1
kill -TERM "$job"
status=0
wait "$job" || status=$?
((status != 0)) || fail 'mpirun reports success'
if [[ $(mpirun --version) == *" 4."* ]]; then # 5 kills before it passes the output on
  expect 4 'got SIGTERM' "$out"
fi
[[ -z $(list_processes) ]] || fail 'processes are still running'

say 'the image experiment, with the script for users'
out=$TMPDIR/image.out
unset GOSSIPJAX_COORDINATOR_ADDRESS
echo 'localhost slots=4' >"$TMPDIR/hosts"
PORT=$free_port within 400 experiments/cluster/openmpi.sh "$TMPDIR/hosts" \
  --algorithm sgp --epochs 1 --out "$TMPDIR/image" >"$out" 2>&1 || fail "exit status $?"
check_training "$TMPDIR/image"
