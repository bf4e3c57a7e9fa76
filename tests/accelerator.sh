#!/usr/bin/env bash
# Run benchmarks and tests on an accelerator.
#   tests/accelerator.sh FOLDER [step…]
# Steps, the most valuable first, all by default: fields decisions lists answers widths kernels tests demo flash
# context batch int8
# Write logs, tables, JSON and the printed summary, Markdown, to FOLDER. A step that fails, or takes more than LIMIT
# seconds (300), does not stop later steps; after TOTAL seconds (720) no further one begins. PYTHON (python3) has
# jax[cuda13] or jax[tpu] and the packages of requirements.txt. MODELS names the checkpoints of the steps `fields`
# (serial, exact and parallel), `decisions` and `lists`, and QUESTIONS the questions of `lists` in FastChat's form. SHAPE
# (7b) and DTYPE (bfloat16) select the random model of the other steps. ANY_DEVICE=1 tests the script itself on a CPU,
# with options of `tests.helpers.on_device` in REAL.
set -uo pipefail
[ $# -gt 0 ] || { sed -n '2,11s/^# //p' "$0"; exit 2; }
mkdir -p "$1"
folder=$(cd "$1" && pwd)
shift
steps=("$@")
[ $# -gt 0 ] || steps=(fields decisions lists answers widths kernels tests demo flash context batch int8)
cd "$(dirname "$0")/.." || exit 2
python=${PYTHON:-python3}
model=(--shape "${SHAPE:-7b}" --dtype "${DTYPE:-bfloat16}")
# A program takes about 20 s to compile for a GPU; autotuning multiplies that, and Triton products are slow without it.
export XLA_FLAGS=${XLA_FLAGS:---xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false}
export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.92}

device=$("$python" -c "import jax; print(jax.default_backend(), jax.device_count(), jax.devices()[0].device_kind, 'jax', jax.__version__)") || exit 1
platform=${device%% *} workers=0
case $platform in
  gpu) platform=cuda workers=6 ;; # processes may share a GPU; most of their time goes into compiling
  cpu) [ -n "${ANY_DEVICE:-}" ] || { echo "JAX sees no accelerator: $device"; exit 1; }
    platform= ;; # the tests' own settings for CPU stay out, as on an accelerator
esac

failed=0
step() { # name, command…
  local name=$1 began=$SECONDS left=$((${TOTAL:-720} - SECONDS))
  shift
  [ $left -gt 0 ] || { echo "== $name: no time left"; return; }
  timeout $((left < ${LIMIT:-300} ? left : ${LIMIT:-300})) "$@" > "$folder/$name.txt" 2>&1
  local status=$?
  [ $status -eq 0 ] || failed=1
  echo "== $name: exit $status, $((SECONDS - began)) s: ${*//$folder/FOLDER}"
  [ $status -eq 0 ] || tail -15 "$folder/$name.txt"
  grep -E '^\||passed|copy|peak|error' "$folder/$name.txt"
}
decode() { # name, options…
  local name=$1
  shift
  step "$name" "$python" -m aspd bench decode "${model[@]}" --json "$folder/$name.json" "$@"
}
real() { # part of tests.helpers.on_device, options…
  # shellcheck disable=SC2086
  step "$1" "$python" -m tests.helpers.on_device ${MODELS:-smollm2} --parts "$1" --seconds $((${LIMIT:-300} - 60)) "${@:2}" ${REAL:-}
}

{
  echo "$device; $(git rev-parse --short HEAD 2> /dev/null)"
  for name in "${steps[@]}"; do
    case $name in
      lists)
        [ -n "${QUESTIONS:-}" ] || { echo "== lists: left out, QUESTIONS names no file"; continue; }
        real lists --questions "$QUESTIONS" --output "$folder/lists" ;;
      fields | decisions) real "$name" ;;
      kernels) step kernels env JAX_PLATFORMS="$platform" XLA_PYTHON_CLIENT_PREALLOCATE=false \
        "$python" -m pytest -q --numprocesses="$workers" -m "" tests/aspd_jax/model/test_kernels_on_device.py ;;
      # Exact comparisons require exact products. Tests that need several devices or start processes are omitted.
      tests) step tests env JAX_PLATFORMS="$platform" JAX_DEFAULT_MATMUL_PRECISION=highest XLA_PYTHON_CLIENT_PREALLOCATE=false \
        "$python" -m pytest -q --numprocesses="$workers" -m "not slow and not several" tests/aspd_jax/model/test_model.py tests/infer/test_replay.py \
        tests/infer/test_engine.py tests/infer/scheduling/test_scheduler.py tests/infer/decode/test_speculation.py tests/infer/decode/test_sampling.py tests/infer/decode/test_grammar.py \
        tests/train/test_train_step.py ;;
      demo) step demo "$python" -m aspd demo ;;
      widths) decode widths --context 2048 --widths 1 2 4 8 16 --answers ;;
      flash) decode flash --decode-attention flash_decode --context 2048 --widths 1 2 4 8 16 --answers ;;
      # torch, if installed, needs memory for the same model.
      answers) XLA_PYTHON_CLIENT_MEM_FRACTION=0.7 decode answers --repeats 5 --context 2048 --widths 1 --answers 2x240 4x120 8x60 16x60 ;;
      context) decode context --context 128 8192 32768 --widths 1 16 --answers --repeats 5 ;;
      batch) XLA_PYTHON_CLIENT_MEM_FRACTION=0.7 decode batch --context 512 --batch 8 32 --widths 1 --answers 8x60 --repeats 5 ;;
      int8) decode int8 --weights int8 --context 2048 --widths 1 8 16 --answers 8x60 ;;
      *) echo "unknown step $name"; failed=1 ;;
    esac
  done
} > >(tee "$folder/summary.txt")
wait
exit $failed
