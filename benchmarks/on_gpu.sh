#!/usr/bin/env bash
# One part of what needs an NVIDIA GPU, on a machine with one: benchmarks/on_gpu.sh PART [FLAG ...]
#
#   env          the device and the versions
#   tests        every test whose packages are here
#   parity       a whole tiny run on the device against the CPU's, float32
#   plan         what `ltx2rt plan` says of a request on this device: the flags are plan's
#   race         attention kernels, products and float8 roads against each other, at the shapes of a step
#   collectives  the placed step's collectives, and the plan for 4 x H100
#   step         guided steps of both stages, full size, against diffusers' on the same weights; again with float8 weights (needs diffusers)
#   stages       the two-stage request with 5 steps, by phase
#   compile      the same with the blocks compiled by Inductor
#   end-to-end   the two-stage request, full size, 3 repetitions
#   float8       the same with float8 weights
#   distilled    the same by the distilled pipeline
#   peer         the same, each repetition followed by diffusers' on the same tensors (needs diffusers); with --peer
#                diffusers-compiled its blocks are compiled, with diffusers-float8 in float8 as well (needs torchao)
#   memory       its peak: everything resident; the text encoder freed after use; one set of stage weights at a time, too
#   stream       weights that come from host memory: one-stage with 24, 12 and 48 GB of the device
#   pin          the time to load such weights, pinned by torch's default and by registering pages
#   train        steps of a LoRA by size of clip, everything resident and with 24 GB of the device
#   serve        20 jobs of three sizes by the server and by a session, in turns: of MODEL, which must fit twice, or of the tiny model
#   profile      kernel groups of one step of each stage
#   kernels      each kernel against eager torch, torch.compile and its floor; again with an image; of float8 linears
#   kernels-of   the same once, with the flags that are given
#   unpack       the kernel that decodes weights kept as files store them, by type
#   cold-start   from a fresh process to the first step, by phase: of MODEL, or of a full-size main file (46 GB in TMPDIR)
#   clip         an MP4 of the tiny model through the command line (needs PyAV)
#   all          the six calls of first_gpu.sh, one after the other; one that fails does not stop the next
#
# FLAGs go to a part's benchmark (all takes none), after those of the part: `stages --device cpu --preset tiny-2.3 --width 128 ...` runs anywhere.
# Needs Python 3.11 or later with torch, numpy, ml_dtypes, safetensors, tokenizers and tqdm; nothing is downloaded.
# On a GPU of less than 120 GB (GPU_GB, by default what it has) --memory auto decides how whole requests keep weights.
# WHEELS: a folder of wheels to install first. OUT: where JSON goes (default: benchmarks/results/gpu). PYTHON: which one.
# MODEL: a checkpoint. COMMIT: recorded where there is no git. Each command ends within LIMIT_S (480) and leaves the JSON of what it had
# finished, the tests leave tests.txt and tests.xml.
set -euo pipefail

known="env tests parity plan race collectives step stages compile end-to-end float8 distilled peer memory stream pin train serve profile kernels kernels-of unpack cold-start clip"
part=${1:?"usage: benchmarks/on_gpu.sh PART [FLAG ...]; the parts stand at the top of this file"}
shift
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
OUT=${OUT:-benchmarks/results/gpu}
LIMIT_S=${LIMIT_S:-480}
mkdir -p "$OUT"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

if [ -n "${WHEELS:-}" ]; then
  "$PYTHON" -m pip install --quiet --no-index --no-deps "$WHEELS"/*.whl
fi
# The tree itself is what runs. Backends are found by entry points, which live in an installed package's metadata.
export PYTHONPATH="$PWD:$PWD/backends:$PWD/kernels:$work${PYTHONPATH:+:$PYTHONPATH}"
# Where CUPTI is taken down in between, a second profile of a process may see no kernel (reported of CUDA 13, not seen here).
export TEARDOWN_CUPTI=${TEARDOWN_CUPTI:-0}
# What needs JAX here runs on the CPU; left to itself JAX takes three quarters of the GPU's memory.
export JAX_PLATFORMS=cpu XLA_PYTHON_CLIENT_PREALLOCATE=false
# From Triton 3.9 on it warns where this is not said, and warnings are errors in tests.
export TRITON_DEFAULT_FP_FUSION=${TRITON_DEFAULT_FP_FUSION:-1}
"$PYTHON" - "$work" <<'PY'
import importlib.metadata, pathlib, sys, tomllib

try:
    importlib.metadata.version("ltx2rt")
except importlib.metadata.PackageNotFoundError:
    import ltx2rt

    folder = pathlib.Path(sys.argv[1], f"ltx2rt-{ltx2rt.__version__}.dist-info")
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: ltx2rt\nVersion: {ltx2rt.__version__}\n")
    lines = []
    for group, entries in tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (folder / "entry_points.txt").write_text("\n".join(lines) + "\n")
PY

has() { "$PYTHON" -c "import $1" 2>/dev/null; }
skip() { echo "skipped $part: $*"; exit 0; }
limited() { timeout --kill-after=10 "$LIMIT_S" "$@"; }
benchmark() { limited "$PYTHON" -m "benchmarks.$1" "${@:2}"; }
end_to_end() { benchmark end_to_end --output "$OUT/$part.json" "$@"; }

# A full-size request in bfloat16 keeps all weights in 110 GB of one GPU (ltx2rt plan).
gb=${GPU_GB:-$("$PYTHON" -c 'import torch; print(torch.cuda.get_device_properties(0).total_memory // 10**9)' 2>/dev/null || echo 0)}
holds_all=1
[ "$gb" = 0 ] || [ "$gb" -ge 120 ] || holds_all=0

case $part in
  env)
    nvidia-smi || echo "no nvidia-smi"
    "$PYTHON" -m pip list 2>/dev/null | grep -iE '^(torch|triton|jax|jaxlib|numpy|transformers|safetensors|av|pytest) ' || true
    "$PYTHON" -c 'import torch; print("cudnn", torch.backends.cudnn.version(), "nccl", torch.cuda.nccl.version())' 2>/dev/null \
      || echo "no cudnn or no nccl"
    limited "$PYTHON" -m ltx2rt.cli devices
    ;;
  tests)
    has pytest && has hypothesis || skip "pytest or hypothesis is not installed; give their wheels with WHEELS"
    missing=$(for name in diffusers peft transformers accelerate av PIL jax; do has "$name" || echo "$name"; done)
    ignored=()
    for name in $missing; do
      echo "$name is not installed: tests that import it are left out"
      imports="^ *(from|import) $name\b"
      # tests/conftest.py skips tests that need jax one by one; what is left are files that cannot be imported.
      [ $name != jax ] || imports="^(from|import) (jax|ltx2rt_tpu)\b"
      while read -r file; do ignored+=("--ignore=$file"); done \
        < <(grep -rlE "$imports" tests --include='test_*.py' || true)
    done
    # An interrupt, unlike a termination, lets pytest report what it has; env: shells start background jobs deaf to it.
    timeout --signal=INT --kill-after=30 "$LIMIT_S" env --default-signal=INT "$PYTHON" -u -m pytest -v -rs \
      -p no:cacheprovider ${ignored[@]+"${ignored[@]}"} --junitxml="$OUT/tests.xml" "$@" | tee "$OUT/tests.txt"
    ;;
  parity)
    tiny=(--width 128 --height 64 --num-frames 17 --steps 3 --dtype float32 --repeats 1)
    for preset in tiny-2.0 tiny-2.3; do
      benchmark end_to_end --preset $preset "${tiny[@]}" --device cpu --save "$work/$preset.npz"
      benchmark end_to_end --preset $preset "${tiny[@]}" --device cuda --against "$work/$preset.npz" \
        --output "$OUT/parity-$preset.json" "$@"
    done
    ;;
  plan)
    card=$("$PYTHON" -c "import torch; print(torch.cuda.get_device_name())" 2>/dev/null || echo none)
    case $card in *H200*) kind=h200-141gb ;; *H100*) kind=h100-80gb ;; *) kind=${KIND:-h200-141gb} ;; esac
    limited "$PYTHON" -m ltx2rt.cli plan --device-kind "$kind" "$@" | tee "$OUT/plan.txt"
    ;;
  race) benchmark race --output "$OUT/race.json" "$@" ;;
  collectives)
    benchmark collectives --output "$OUT/collectives.json" "$@"
    limited "$PYTHON" -m ltx2rt.cli plan --preset ltx-2.3 --devices 4 --device-kind h100-80gb
    ;;
  step)
    has diffusers || skip "diffusers is not installed; give its wheel with WHEELS"
    benchmark step --device cuda --output "$OUT/step.json" "$@"
    benchmark step --device cuda --weights-dtype float8 --output "$OUT/step-float8.json" "$@"
    ;;
  stages) end_to_end --device cuda --steps 5 --repeats 3 "$@" ;;
  compile) end_to_end --device cuda --steps 5 --repeats 3 --compile "$@" ;;
  end-to-end) end_to_end --device cuda --repeats 3 "$@" ;;
  float8) end_to_end --device cuda --repeats 3 --weights-dtype float8 "$@" ;;
  distilled) end_to_end --device cuda --repeats 3 --pipeline distilled "$@" ;;
  peer)
    has diffusers || skip "diffusers is not installed; give its wheel with WHEELS"
    case "$*" in *diffusers-float8*) has torchao || skip "torchao is not installed; give its wheel with WHEELS" ;; esac
    [ $holds_all = 1 ] || skip "both keep everything resident, which does not fit in $gb GB"
    end_to_end --device cuda --repeats 3 --peer diffusers "$@"
    ;;
  memory)
    peak() { benchmark end_to_end --device cuda --steps 5 --repeats 1 --output "$OUT/memory-$1.json" "${@:2}"; }
    status=0 # what is too large for this device leaves the others to be measured
    [ $holds_all = 1 ] || echo "memory: everything resident does not fit in $gb GB; left out"
    [ $holds_all = 0 ] || peak resident "$@" || status=$?
    peak 90 --max-memory 90 "$@" || status=$?
    peak 60 --max-memory 60 "$@" || status=$?
    exit "$status"
    ;;
  stream)
    status=0 # one stage: no second set of weights that would be drawn again for each request
    for max in 24 12 48; do
      benchmark end_to_end --device cuda --pipeline one-stage --steps 5 --repeats 2 --max-memory $max --output "$OUT/stream-$max.json" "$@" || status=$?
    done
    exit "$status"
    ;;
  pin)
    for pinned in False True; do
      PYTORCH_CUDA_ALLOC_CONF=pinned_use_cuda_host_register:$pinned,pinned_num_register_threads:8 \
        benchmark end_to_end --device cuda --pipeline one-stage --steps 2 --repeats 1 --max-memory 24 \
        --output "$OUT/pin-registered-$pinned.json" "$@"
    done
    ;;
  train)
    status=0
    benchmark train --device cuda --output "$OUT/train.json" "$@" || status=$?
    benchmark train --device cuda --max-memory 24 --rounds 3 --output "$OUT/train-24.json" "$@" || status=$?
    exit "$status"
    ;;
  serve)
    model=(--model examples/tiny-trained --width 128 --height 128 --num-frames 25 --others 128x64x17 64x128x33)
    [ -z "${MODEL:-}" ] || model=(--model "$MODEL" --others 512x512x49 1280x704x121)
    benchmark serve --device cuda "${model[@]}" --jobs 20 --rounds 1 --posts 20 --output "$OUT/serve.json" "$@"
    ;;
  profile) end_to_end --device cuda --steps 2 --repeats 1 --profile-kernels "$@" ;;
  kernels)
    benchmark kernels --device cuda --output "$OUT/kernels.json" "$@"
    benchmark kernels --device cuda --levels 2 --ops norm_modulate gated_residual residual_norm_modulate \
      --output "$OUT/kernels-image.json" "$@"
    benchmark kernels --device cuda --weights-dtype float8 --ops quantise_rows --output "$OUT/kernels-float8.json" "$@"
    ;;
  kernels-of) benchmark kernels --device cuda --output "$OUT/kernels-of.json" "$@" ;;
  unpack)
    benchmark kernels --device cuda --ops unpack --stored int8 "int8 rotated by 256" float8 nvfp4 mxfp8 Q8_0 Q4_K Q6_K \
      --contestants kernel eager --rounds 3 --output "$OUT/kernels-stored.json" "$@"
    ;;
  cold-start)
    model=(--preset ltx-2.3 --no-text)
    [ -z "${MODEL:-}" ] || model=(--model "$MODEL")
    benchmark cold_start --device cuda "${model[@]}" --rounds 1 --output "$OUT/cold-start.json" "$@"
    ;;
  clip)
    has av || skip "PyAV is not installed; give its wheel with WHEELS"
    limited "$PYTHON" -m ltx2rt.cli weights make --preset tiny-2.3 --layout official "$work/tiny"
    limited "$PYTHON" -m ltx2rt.cli generate --backend cuda --device cuda --model "$work/tiny" --prompt "a red fox" \
      --width 256 --height 128 --num-frames 25 --steps 4 --seed 7 --output "$OUT/clip.mp4" --report "$OUT/clip.json" "$@"
    ;;
  all)
    [ $# = 0 ] || { echo "on_gpu.sh: all takes no FLAG, found $*; run the part that it is for" >&2; exit 2; }
    failed=()
    for call in 1 2 3 4 5 6; do
      OUT=$OUT benchmarks/first_gpu.sh "$call" || failed+=("$call")
    done
    [ ${#failed[@]} = 0 ] || { echo "calls with a part that failed: ${failed[*]}" >&2; exit 1; }
    ;;
  *)
    echo "on_gpu.sh: unknown part $part; known: $known all" >&2
    exit 2
    ;;
esac
