#!/bin/sh
# Usage: until.sh COMMAND ...
# Starts a process of the job again until it has succeeded, as systemd does with
# gossip.service. Exit statuses 2, 64 and 78 mean a mistake in the call or in a
# setting: another start would fail, too.
export GOSSIPJAX_INITIALIZATION_TIMEOUT="${GOSSIPJAX_INITIALIZATION_TIMEOUT:-3600}"
trap 'is_over=1; kill "$!" 2>/dev/null' TERM INT
until "$@" & wait "$!"; do
  status=$?
  [ -n "$is_over" ] && wait "$!"
  [ -n "$is_over" ] && exit "$status"
  case "$status" in 2 | 64 | 78)
    echo "until.sh: status $status would come again: correct it, and start again" >&2
    exit "$status" ;;
  esac
  sleep 5 & wait "$!" # a signal ends this pause, too
  [ -z "$is_over" ] || exit "$status"
done
