#!/bin/bash
# prof.sh NAME args...
n=$1; shift
cd /work/w/fast; export PYTHONPATH=/work/w/fast/src JAX_PLATFORMS=none_such
/work/main/.venv/bin/python -m cProfile -o /tmp/fast/$n.prof -m spanax plan "$@" --json > /dev/null
/work/main/.venv/bin/python - <<PY > /tmp/fast/$n.txt
import pstats
s=pstats.Stats('/tmp/fast/$n.prof')
s.sort_stats('cumtime').print_stats(150)
s.sort_stats('tottime').print_stats(70)
PY
