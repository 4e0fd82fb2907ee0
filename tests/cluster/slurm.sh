#!/usr/bin/env bash
# Under a real Slurm, whose controller and only host are this machine: the processes find their job,
# a failure ends it, SIGTERM by scancel arrives, a batch script without srun is one process, and the
# image experiment trains. As root on Debian this installs Slurm; the exit status is 77 if it is not
# available.
#
#   tests/cluster/slurm.sh .venv/bin/python
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
((EUID == 0)) || skip 'only root can run the daemons of Slurm'
command -v munged slurmctld slurmd srun sbatch >/dev/null ||
  install_debian munge slurmctld slurmd slurm-client
slurmd -V

host_is_idle() { [[ $(sinfo -h -o %T 2>/dev/null) == idle ]]; }

clean_up() { # slurmstepd exits only after the processes of its step
  if [[ $(sinfo -h 2>/dev/null) ]]; then
    scancel --quiet --user=root --signal=KILL
    scancel --quiet --user=root
    wait_for 40 host_is_idle
  fi
}

say 'munged, slurmctld and slurmd'
mkdir "$TMPDIR/state" "$TMPDIR/spool"
(umask 077 && head -c 1024 /dev/urandom >"$TMPDIR/munge.key")
read -r controller_port daemon_port < <("$python" -c '
import socket
servers = [socket.create_server(("", 0)) for _ in range(2)]
print(*(server.getsockname()[1] for server in servers))')
host=$(uname -n)
host=${host%%.*}
export SLURM_CONF=$TMPDIR/slurm.conf
# No cgroups: neither for processes (proctrack) nor for devices or memory (task, jobacct_gather).
# Slurm is told that the host has 4 CPUs.
cat >"$SLURM_CONF" <<CONF
ClusterName=test
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$controller_port
SlurmdPort=$daemon_port
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$TMPDIR/munge.socket
CredType=cred/munge
StateSaveLocation=$TMPDIR/state
SlurmdSpoolDir=$TMPDIR/spool
SlurmctldPidFile=$TMPDIR/slurmctld.pid
SlurmdPidFile=$TMPDIR/slurmd.pid
SlurmctldLogFile=/dev/null
SlurmdLogFile=/dev/null
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=20
NodeName=localhost NodeHostname=$host NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
munged --foreground --socket="$TMPDIR/munge.socket" --key-file="$TMPDIR/munge.key" \
  --pid-file="$TMPDIR/munged.pid" --seed-file="$TMPDIR/munge.seed" >"$TMPDIR/munged.out" 2>&1 &
wait_for 10 test -S "$TMPDIR/munge.socket" || fail 'munged does not start'
# Older versions have no cgroup plugin "disabled"; there, cgroup/v1 does nothing, as it is not used.
for plugin in disabled cgroup/v1; do
  echo "CgroupPlugin=$plugin" >"$TMPDIR/cgroup.conf"
  slurmd -D -N localhost >"$TMPDIR/slurmd.out" 2>&1 &
  slurmd=$!
  sleep 2
  if kill -0 "$slurmd" 2>/dev/null; then break; fi
done
slurmctld -D >"$TMPDIR/slurmctld.out" 2>&1 &
wait_for 60 host_is_idle || fail 'Slurm does not start'

program=("$python" tests/cluster/program.py)

say 'srun: JAX detects the job'
out=$TMPDIR/exit.out
within 120 srun -n 4 "${program[@]}" exit >"$out" 2>&1 || fail "srun: exit status $?"
expect 4 'of 4: averaged' "$out"

say 'a process that fails ends the others'
out=$TMPDIR/failure.out
status=0
within 90 srun -n 4 --kill-on-bad-exit=1 "${program[@]}" fail >"$out" 2>&1 || status=$?
((status != 0 && status != 124)) || fail "srun: exit status $status"
expect 1 'RuntimeError: as asked for' "$out"

say 'SIGTERM by scancel arrives'
out=$TMPDIR/sigterm.out
job=$(sbatch --parsable -n 4 --output="$out" --wrap "exec srun ${program[*]} wait")
wait_for 90 has 4 averaged "$out" || fail 'the processes did not start'
sleep 1
scancel "$job"
wait_for 40 host_is_idle || fail 'the job does not end'
expect 4 'got SIGTERM' "$out"

say 'a batch script without srun is one process'
out=$TMPDIR/single.out
within 90 sbatch --wait -n 4 --output="$out" --wrap "exec ${program[*]} exit" ||
  fail "sbatch: exit status $?"
expect 1 'process 0 of 1: averaged' "$out"

say 'the image experiment, with the script for users'
out=$TMPDIR/image.out
within 400 sbatch --wait --nodes=1 --ntasks-per-node=4 --cpus-per-task=1 --output="$out" \
  experiments/cluster/slurm.sbatch --algorithm sgp --epochs 1 --out "$TMPDIR/image" ||
  fail "sbatch: exit status $?"
check_training "$TMPDIR/image"
