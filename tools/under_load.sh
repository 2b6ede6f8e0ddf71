#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
# Repeats a command while one process per core does nothing but compute: what passes only on a quiet
# machine fails here.
#
#   tools/under_load.sh TIMES COMMAND...
#
# Exit status: 0 the command succeeded each time; 1 it failed at least once, and each time is named.
set -euo pipefail

if [ "$#" -lt 2 ] || ! [ "$1" -ge 1 ] 2> /dev/null; then
  echo "under_load: expected TIMES and a COMMAND, e.g. tools/under_load.sh 20 ctest, got '$*'" >&2
  exit 2
fi
times=$1
shift

busy=()
trap 'kill "${busy[@]}"' EXIT
for _ in $(seq "$(nproc)"); do
  (while :; do :; done) &
  busy+=("$!")
done

failed=()
for ((i = 1; i <= times; i++)); do
  echo "--- under load, $i of $times, load $(cut -d ' ' -f 1 /proc/loadavg)"
  "$@" || failed+=("$i")
done
echo "under_load: $((times - ${#failed[@]})) of $times runs passed${failed[*]:+, failed: ${failed[*]}}"
[ "${#failed[@]}" -eq 0 ]
