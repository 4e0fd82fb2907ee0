# shellcheck shell=bash
# What the tests of schedulers share; they source it, with the environment's Python as argument.
# Every process of a test has $TMPDIR in its environment, a folder of this test alone: whatever
# happens, those that are left are ended, and the folder goes.
set -euo pipefail

skip() {
  echo "skipped: $*" >&2
  exit 77
}

say() { printf '\n== %s\n' "$*"; }

fail() { # said at the end, after what the processes have printed
  problem=$*
  exit 1
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
# The place in the job must come from the scheduler, and from this one.
for name in "${!GOSSIPJAX_@}" "${!JAX_@}" "${!OMPI_@}" "${!SLURM_@}" "${!SBATCH_@}" "${!SRUN_@}"; do
  unset "$name"
done
export PYTHONPATH=$root JAX_PLATFORMS=cpu
TMPDIR=$(mktemp -d)
export TMPDIR
chmod 755 "$TMPDIR"
policy=/usr/sbin/policy-rc.d
made_policy=false

left() { # the processes of this test, without this shell: its environment was there before
  local environ pid
  for environ in /proc/[0-9]*/environ; do
    pid=$(basename "$(dirname "$environ")")
    if [[ $pid != "$BASHPID" ]] && grep -qszFx "TMPDIR=$TMPDIR" "$environ"; then
      echo "$pid"
    fi
  done
}

end_all() { # with a signal; waits until they have ended, ten seconds at most
  local pids
  for _ in $(seq 20); do
    mapfile -t pids < <(left)
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
  if declare -F before_the_end >/dev/null; then before_the_end; fi
  end_all TERM
  end_all KILL
  rm -rf "$TMPDIR"
  if $made_policy; then rm -f "$policy"; fi
  exit "$status"
}
trap finish EXIT
trap 'fail interrupted' INT TERM HUP
python=$(command -v "${1-}") || fail "${1-no argument}: not the Python of an environment"
python=$(realpath -s "$python") # no further: it is a link, and knows its environment by that
export PYTHON=$python
cd "$root"

install_debian() { # packages; no service of them is started
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

within() { # SECONDS COMMAND...: so that signals to this script are not kept waiting
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

has() { # COUNT TEXT FILE: so often; lines of processes may run together
  [[ -f $3 && $(grep -oF -- "$2" "$3" | wc -l) == "$1" ]]
}

expect() { # COUNT TEXT FILE
  has "$@" || fail "'$2' is not $1 times in the output"
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
