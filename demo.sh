#!/usr/bin/env bash
# The five stages on the embedded default (tiny model, MiniWoB++, real Chromium); 15 minutes on two cores.
#   ./demo.sh           into runs/demo; a second call goes on where the first one stopped
#   ./demo.sh --smoke   every stage in under 3 minutes, into runs/smoke; proves nothing about learning
# The last line is one JSON object: sft_success, rl_success, gain, gain_ci95, n, minutes.
set -euo pipefail
cd "$(dirname "$0")"
case "${1:-}" in
  "") name=demo; preset="--preset demo" ;;
  --smoke) name=smoke; preset="--preset demo --preset smoke" ;;
  *) echo "usage: ./demo.sh [--smoke]" >&2; exit 2 ;;
esac
./setup.sh
export OMP_WAIT_POLICY=passive TOKENIZERS_PARALLELISM=false  # idle torch threads sleep: browsers need the cores
python=.venv/bin/python
started=$(date +%s)

echo "== 0 · demonstrations and a random tiny model"
$python demo/demonstrate.py $preset
$python demo/tiny_model.py $preset

echo "== 1 · annotate: a local teacher writes the subtasks"
mkdir -p runs/$name; rm -f runs/$name/teacher.port
$python demo/teacher.py $preset --port_file runs/$name/teacher.port & teacher=$!
trap 'kill $teacher 2>/dev/null || true' EXIT
for _ in $(seq 100); do [ -s runs/$name/teacher.port ] && break; sleep 0.1; done
OPENAI_API_KEY=none $python annotate.py $preset --base_url "http://127.0.0.1:$(cat runs/$name/teacher.port)/v1"
kill $teacher; trap - EXIT
$python annotate.py stats $preset

echo "== 2 · supervised fine-tuning of both roles"
$python sft.py $preset --role decomposer
$python sft.py $preset --role actor

echo "== 4 · evaluate: the two fine-tuned roles, before RL"
$python evaluate.py $preset --run_dir runs/$name/eval_sft

echo "== 3 · joint hierarchical GRPO"
$python grpo_hier.py $preset

echo "== 4 · evaluate: the same after RL"
$python evaluate.py $preset --run_dir runs/$name/eval_rl --adapters runs/$name

echo "== 5 · analysis"
$python analysis.py curve --runs runs/$name
$python analysis.py view --runs sft=runs/$name/eval_sft,rl=runs/$name/eval_rl --out runs/$name/episodes.html
echo "look at every episode: runs/$name/episodes.html opens from disk in any browser"
$python analysis.py demo --a runs/$name/eval_sft --b runs/$name/eval_rl --started "$started"
