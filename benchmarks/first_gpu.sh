#!/usr/bin/env bash
# An hour of one rented GPU in six calls, each under ten minutes: benchmarks/first_gpu.sh 1, then 2, and so on
#
#   1  LTX-2.5, distilled, 1920x1088, 121 frames: both decoders, both types, 24 and 12 GB, attention, beside diffusers' step
#   2  the whole request of LTX-2.3 in bfloat16 and float8, distilled in three sizes, LTX-2.5 at 768x512
#   3  the request beside diffusers': as it is, compiled, compiled in float8; a step of LTX-2.5 with compiled blocks
#   4  what people do: training, the server, stored weights, pinned memory; products after ten seconds of load
#   5  does it run, are the numbers right, both steps against diffusers', which attention is fastest
#   6  where the time goes, each kernel over its floor, peak memory, weights from host memory, half of the evaluations
#
# A call ends within CALL_S (560) and leaves one archive, OUT/call-N.tgz, whatever happened to its parts: each part of
# on_gpu.sh has a limit of its own, one that fails or is cut off leaves what it had, and the next one goes on. Limits
# may come to more than CALL_S: the last part has what the others left.
# Where there is nvidia-smi, a part's power.csv has the card's power, clock, temperature and memory five times a second, and
# the summary its mean and maximum, and its energy; a clock counts while the power is over half of the maximum.
# PARTS: lines `NAME SECONDS PART FLAG ...` to run in place of the call's own. The rest of the environment is on_gpu.sh's.
set -uo pipefail
cd "$(dirname "$0")/.."
call=${1:-}
new="--preset ltx-2.5 --width 1920 --height 1088 --num-frames 121"
case $call in
  1) own="env 20 env
plan 20 plan --preset ltx-2.5 --pipeline distilled --size 1920x1088 --num-frames 121
bfloat16 110 distilled $new --repeats 2
conv 60 distilled $new --video-decoder conv --repeats 2
float8 60 distilled $new --weights-dtype float8 --repeats 2
attention 40 race --attention 1x32640x32640x32x128 1x8160x8160x32x128 1x32640x1024x32x128 1x32640x126x32x64
neighbourhood 40 kernels-of $new --ops neighbourhood_attention --contestants kernel
memory-24 60 distilled $new --max-memory 24 --repeats 1
memory-12 60 distilled $new --max-memory 12 --repeats 1
step 90 step --generation 2.5 --pipeline distilled --clip 1920 1088 121 --rounds 3" ;;
  2) own="end-to-end 130 end-to-end
float8 110 float8
distilled 80 distilled
distilled-1280x704 80 distilled --width 1280 --height 704 --repeats 2
distilled-1920x1088 100 distilled --width 1920 --height 1088 --repeats 1
ltx-2.5 60 distilled --preset ltx-2.5 --num-frames 121 --repeats 2" ;;
  3) own="peer 140 peer --repeats 2
compiled 150 peer --peer diffusers-compiled --repeats 2
float8 150 peer --peer diffusers-float8 --weights-dtype float8 --repeats 2
step-compiled 110 step --generation 2.5 --pipeline distilled --clip 1920 1088 121 --rounds 3 --compile" ;;
  4) own="train 150 train --preset ltx-2.5 --sizes 768x512x49
serve 120 serve
unpack 60 unpack
pin 90 pin
race 190 race --sustain 10" ;;
  5) own="env 40 env
race 70 race
recorded 60 tests tests/backends/test_recorded.py -k not(compiled) --tb=short
kernel-tests 110 tests tests/kernels/test_kernels.py -k cuda --tb=short
parity 90 parity
step 180 step" ;;
  6) own="profile 70 profile
kernels 150 kernels
memory 120 memory
stream 120 stream
step-plan 80 float8 --step-plan 0,2,4,6,8,10,12,14,16,18,20,22,24,26,28 --repeats 2" ;;
  *)
    echo "usage: benchmarks/first_gpu.sh 1|2|3|4|5|6; what each call answers is at the top of this file" >&2
    exit 2
    ;;
esac
home=${OUT:-benchmarks/results/gpu}
CALL_S=${CALL_S:-560}
PACK_S=10 # to write the archive
METER_MS=200
mkdir -p "$home"
kept=$(mktemp -d)
meter=
# Mean and maximum of what the meter wrote, one line.
metered() {
  awk -F', *' '
    $2 + 0 > 0 { n++; sum += $2; watts[n] = $2; clock[n] = $3; if ($2 + 0 > most) most = $2 + 0 }
    END {
      if (!n) exit
      for (i = 1; i <= n; i++) if (watts[i] > most / 2) { busy++; mhz += clock[i] }
      printf "   %.0f W mean, %.0f W most, %.0f J, %.0f MHz under load\n", sum / n, most, sum * '"$METER_MS"' / 1000, mhz / busy
    }' "$1"
}
finish() {
  [ -z "$meter" ] || kill "$meter" 2> /dev/null
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
  meter=
  if command -v nvidia-smi > /dev/null; then
    nvidia-smi --query-gpu=timestamp,power.draw,clocks.sm,temperature.gpu,memory.used \
      --format=csv,noheader,nounits -lms "$METER_MS" > "$kept/$name/power.csv" 2> /dev/null < /dev/null &
    meter=$!
  fi
  # Its own limit ends first: a part that is killed from outside would leave its benchmark running.
  # shellcheck disable=SC2086 # flags are words
  OUT="$kept/$name" LIMIT_S=$((limit * 9 / 10)) timeout --kill-after=5 "$limit" \
    benchmarks/on_gpu.sh "$part" $flags > "$kept/$name/log" 2>&1 < /dev/null
  ended=$?
  [ -z "$meter" ] || kill "$meter" 2> /dev/null
  [ "$ended" = 0 ] || status=1
  {
    echo "== $name: status $ended, $((SECONDS - from)) s"
    grep -vE '^ *$|Warning|^written to ' "$kept/$name/log" | tail -n 14 | cut -c1-170
    [ -z "$meter" ] || metered "$kept/$name/power.csv"
  } >> "$kept/summary"
done <<< "${PARTS:-$own}"
exit "$status"
