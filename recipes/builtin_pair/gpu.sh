#!/usr/bin/env bash
# The recipe on a GPU machine: `gpu.sh corpus`, then `gpu.sh train OUT`; `gpu.sh redraft OUT` makes a drafter
# for the target that is there.
set -euo pipefail
cd "$(dirname "$0")"
build=../../build/pair
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=true
case "$1" in
corpus) python3 corpus.py $build/teacher.pt $build --seconds "${SECONDS_OF_WRITING:-220}" ;;
train | redraft)
  rm -rf $build/pair && mkdir -p $build/pair
  [ "$1" = redraft ] && target=(--target ../../src/dsi/assets/builtin_pair/target) || target=()
  python3 train.py $build $build/pair "${target[@]}" --target-seconds "${TARGET_SECONDS:-230}" \
    --writing-seconds "${WRITING_SECONDS:-75}" --drafter-seconds "${DRAFTER_SECONDS:-260}"
  # Few files, so that they travel: the weights, and everything else in one archive.
  (cd $build/pair && for model in */; do
    for file in "$model"*.safetensors; do cp "$file" "$2/${model%/}-$(basename "$file")"; done
  done && tar czf "$2/rest.tgz" figures.json */*.json)
  ;;
esac
