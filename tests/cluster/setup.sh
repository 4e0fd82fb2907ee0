# shellcheck shell=bash
# Shared by the tests of this folder, which source it with the environment's Python as argument.
# Every process of a test has $TMPDIR in its environment, a folder that only this test uses. So
# processes that are still running at the end can be found and killed; then the folder is removed.
set -euo pipefail

skip() {
  echo "skipped: $*" >&2
  exit 77
}

say() { printf '\n== %s\n' "$*"; }

fail() { # printed at the end, after the output of the processes
  problem=$*
  exit 1
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
# The scheduler under test must be the only source of process information.
for name in "${!GOSSIPJAX_@}" "${!JAX_@}" "${!OMPI_@}" "${!SLURM_@}" "${!SBATCH_@}" "${!SRUN_@}"; do
  unset "$name"
done
export PYTHONPATH=$root JAX_PLATFORMS=cpu
TMPDIR=$(mktemp -d)
export TMPDIR
chmod 755 "$TMPDIR"
policy=/usr/sbin/policy-rc.d
made_policy=false

list_processes() { # of this test; not this shell, whose environment is older
  local environ pid
  for environ in /proc/[0-9]*/environ; do
    pid=$(basename "$(dirname "$environ")")
    if [[ $pid != "$BASHPID" ]] && grep -qszFx "TMPDIR=$TMPDIR" "$environ"; then
      echo "$pid"
    fi
  done
}

signal_all() { # SIGNAL: to the processes of this test; waits for their exit, at most 10 seconds
  local pids
  for _ in $(seq 20); do
    mapfile -t pids < <(list_processes)
    ((${#pids[@]})) || return 0
    kill "-$1" "${pids[@]}" 2>/dev/null || true
    sleep 0.5
  done
}

finish() {
  local status=$?
  trap - EXIT INT TERM HUP
  set +e
  if ((status != 0 && status != 77)); then
    tail -n 40 "$TMPDIR"/*.out 2>/dev/null
    echo "failed: ${problem:-exit status $status}" >&2
  fi
  if declare -F clean_up >/dev/null; then clean_up; fi
  signal_all TERM
  signal_all KILL
  rm -rf "$TMPDIR"
  if $made_policy; then rm -f "$policy"; fi
  exit "$status"
}
trap finish EXIT
trap 'fail interrupted' INT TERM HUP
python=$(command -v "${1-}") || fail "${1-no argument}: not the Python of an environment"
python=$(realpath -s "$python") # -s: it is a link, whose path determines the environment
export PYTHON=$python
cd "$root"

install_debian() { # PACKAGE...: without starting their services
  [[ -f /etc/debian_version ]] || skip "this is not Debian, where $* could be installed"
  ((EUID == 0)) || skip "only root can install $*"
  if [[ ! -e $policy ]]; then
    made_policy=true
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
  fi
  local options=(-qq -o Acquire::Retries=1 -o Acquire::http::Timeout=20)
  export DEBIAN_FRONTEND=noninteractive
  { apt-get "${options[@]}" update &&
    apt-get "${options[@]}" install -y --no-install-recommends "$@"; } >"$TMPDIR/apt.out" 2>&1 ||
    skip "apt-get cannot install $*: $(grep -m 1 '^E:' "$TMPDIR/apt.out")"
}

within() { # SECONDS COMMAND...: in the background, so that signals interrupt this script
  timeout --kill-after=10 "$@" </dev/null &
  wait $!
}

wait_for() { # SECONDS COMMAND...: until it succeeds
  local deadline=$((SECONDS + $1))
  shift
  until "$@"; do
    ((SECONDS < deadline)) || return 1
    sleep 0.5
  done
}

has() { # COUNT TEXT FILE: whether the text occurs COUNT times, several times in a line, too
  [[ -f $3 && $(grep -oF -- "$2" "$3" | wc -l) == "$1" ]]
}

expect() { # COUNT TEXT FILE
  has "$@" || fail "'$2' does not occur $1 times in the output"
}

check_training() { # FOLDER: one run, on 4 nodes
  "$python" - "$1/summary.json" <<'PYTHON'
import json, sys
[run] = json.load(open(sys.argv[1]))["runs"]
print({name: run[name] for name in ("algorithm", "nodes", "test_accuracy_average_model")})
assert run["nodes"] == 4 and len(run["test_accuracy_nodes"]) == 4
assert run["test_accuracy_average_model"] > 0.5
PYTHON
}
