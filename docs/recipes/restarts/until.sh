#!/bin/sh
# Usage: until.sh COMMAND ...
# Starts a process of the job again until it has succeeded, as systemd does with
# gossip.service. Exit status 2 is a mistake in the call: another start would fail, too.
export GOSSIPJAX_INITIALIZATION_TIMEOUT="${GOSSIPJAX_INITIALIZATION_TIMEOUT:-3600}"
trap 'is_over=1; kill "$!" 2>/dev/null' TERM INT
until "$@" & wait "$!"; do
  status=$?
  [ -n "$is_over" ] && wait "$!"
  [ -n "$is_over" ] || [ "$status" -eq 2 ] && exit "$status"
  sleep 5 & wait "$!" # a signal ends this pause, too
  [ -z "$is_over" ] || exit "$status"
done
