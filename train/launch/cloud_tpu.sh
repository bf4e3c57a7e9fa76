#!/bin/bash
# Fine-tune on all hosts of a Cloud TPU slice:
#   train/launch/cloud_tpu.sh NAME ZONE BUCKET configs/vicuna_7b.yaml runs/vicuna mesh.fsdp=16 optimiser.accumulate=1
# Copy the checkout to every host, install it, mount the bucket, and start one process per host. The script may be run
# again; completed steps are skipped. After the loss of a slice, training resumes from the last checkpoint. The bucket
# needs a hierarchical namespace: checkpoints are folders that are renamed, which gcsfuse refuses in a flat bucket.
# PYTHON names Python 3.11 or newer on the hosts (default: python3); images with Ubuntu 22.04 have 3.10.
set -euo pipefail
name=$1 zone=$2 bucket=$3 config=$4 output=$5 python=${PYTHON:-python3}
shift 5
everywhere() { gcloud compute tpus tpu-vm ssh "$name" --zone "$zone" --worker=all --command "$1"; }
archive=$(mktemp)
trap 'rm "$archive"' EXIT
tar --exclude='./.*' --exclude=./runs --exclude=./checkpoints -czf "$archive" .
gcloud compute tpus tpu-vm scp --zone "$zone" --worker=all "$archive" "$name":aspd-jax.tar.gz
everywhere "mkdir -p aspd-jax && tar -xzf aspd-jax.tar.gz -C aspd-jax && cd aspd-jax && $python -m venv .venv && .venv/bin/pip install -q -r requirements-runtime.txt \
  && .venv/bin/pip install -q 'jax[tpu]' && .venv/bin/pip install -q --no-deps -e ."
everywhere "mkdir -p shared && (mountpoint -q shared || gcsfuse --implicit-dirs '$bucket' shared)"
# On Cloud TPU, JAX finds the other hosts without options.
everywhere "cd aspd-jax && .venv/bin/aspd train '$config' $* --output ~/shared/'$output' --distributed"
