#!/usr/bin/env bash
# Half an hour of one rented GPU in three calls, each under ten minutes: benchmarks/first_gpu.sh 1, then 2, then 3
#
#   1  does it run, are the numbers right, both steps against diffusers', which attention is fastest
#   2  the whole request, where its time goes, each kernel over its floor, float8
#   3  peak memory, weights from host memory, the request beside diffusers', blocks compiled by Inductor
#
# A call ends within CALL_S (560) and leaves one archive, OUT/call-N.tgz, whatever happened to its parts: each part of
# on_gpu.sh has a limit of its own, one that fails or is cut off leaves what it had, and the next one goes on.
# PARTS: lines `NAME SECONDS PART FLAG ...` to run in place of the call's own. The rest of the environment is on_gpu.sh's.
set -uo pipefail
cd "$(dirname "$0")/.."
call=${1:-}
case $call in
  1) own="env 40 env
race 70 race
recorded 60 tests tests/backends/test_recorded.py -k not(compiled) --tb=short
kernel-tests 110 tests tests/kernels/test_kernels.py -k cuda --tb=short
stages 120 stages
step 300 step" ;;
  2) own="end-to-end 130 end-to-end
profile 90 profile
kernels 200 kernels
stages-float8 90 stages --weights-dtype float8
ltx-2.5 90 stages --preset ltx-2.5 --num-frames 121 --repeats 1
parity 120 parity" ;;
  3) own="memory 200 memory
stream 240 stream
peer 240 peer
compile 250 compile" ;;
  *)
    echo "usage: benchmarks/first_gpu.sh 1|2|3; what each call answers is at the top of this file" >&2
    exit 2
    ;;
esac
home=${OUT:-benchmarks/results/gpu}
CALL_S=${CALL_S:-560}
PACK_S=10 # to write the archive
mkdir -p "$home"
kept=$(mktemp -d)
finish() {
  tar czf "$home/call-$call.tgz" -C "$kept" .
  cat "$kept/summary"
  rm -rf "$kept"
}
trap finish EXIT
status=0
while read -r name limit part flags; do
  left=$((CALL_S - SECONDS - PACK_S))
  if [ "$left" -lt 25 ]; then
    echo "== $name: no time left" >> "$kept/summary"
    continue
  fi
  [ "$left" -ge "$limit" ] || limit=$left
  from=$SECONDS
  mkdir -p "$kept/$name"
  # Its own limit ends first: a part that is killed from outside would leave its benchmark running.
  # shellcheck disable=SC2086 # flags are words
  OUT="$kept/$name" LIMIT_S=$((limit * 9 / 10)) timeout --kill-after=5 "$limit" \
    benchmarks/on_gpu.sh "$part" $flags > "$kept/$name/log" 2>&1 < /dev/null
  ended=$?
  [ "$ended" = 0 ] || status=1
  {
    echo "== $name: status $ended, $((SECONDS - from)) s"
    grep -vE '^ *$|Warning' "$kept/$name/log" | tail -n 14 | cut -c1-170
  } >> "$kept/summary"
done <<< "${PARTS:-$own}"
exit "$status"
