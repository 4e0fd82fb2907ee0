#!/usr/bin/env bash
# Under a real mpirun, of 4 processes on this machine: the place is found, a failure ends the job,
# SIGTERM arrives, and the image experiment trains. Debian as root installs Open MPI; exit status 77
# where it cannot be had.
#
#   tests/schedulers/openmpi.sh .venv/bin/python
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
command -v mpirun >/dev/null || install_debian openmpi-bin
mpirun --version | head -n 1
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
free_port=$("$python" -c 'import socket; s = socket.create_server(("", 0)); print(s.getsockname()[1])')
four=(mpirun -n 4 --oversubscribe "$python" tests/schedulers/program.py)
out=$TMPDIR/place.out

if [[ $(mpirun --version) == *" 4."* ]]; then
  say 'Open MPI 4: the place comes from JAX'
else
  say 'Open MPI 5: the place comes from Open MPI, and the coordinator from us'
  export GOSSIPJAX_COORDINATOR=127.0.0.1:$free_port
fi
within 120 "${four[@]}" end >"$out" 2>&1 || fail "mpirun: exit status $?"
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
wait_for 90 has 4 averaged "$out" || fail 'the processes did not come up'
sleep 1
kill -TERM "$job"
status=0
wait "$job" || status=$?
((status != 0)) || fail 'mpirun says that all is well'
if [[ $(mpirun --version) == *" 4."* ]]; then # 5 kills before their words are passed on
  expect 4 'got SIGTERM' "$out"
fi
[[ -z $(left) ]] || fail 'there are processes left'

say 'the image experiment, by the file that users take'
out=$TMPDIR/image.out
unset GOSSIPJAX_COORDINATOR
echo 'localhost slots=4' >"$TMPDIR/hosts"
PORT=$free_port within 400 experiments/schedulers/openmpi.sh "$TMPDIR/hosts" \
  --algorithm sgp --epochs 1 --out "$TMPDIR/image" >"$out" 2>&1 || fail "exit status $?"
check_training "$TMPDIR/image"
