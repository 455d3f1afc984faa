export PYTHONPATH=/tmp/newcomer/mmdata
mmdata(){ timeout 90 /work/main/.venv/bin/python -m mmdata "$@"; }
py(){ timeout 90 /work/main/.venv/bin/python "$@"; }
