# Finds a Python and keeps virtual environments for the entry scripts. Sourced by them, not run.
# shellcheck shell=bash

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
unset PYTHONDONTWRITEBYTECODE # modules are compiled as they are first imported, once

die() {
  printf 'tools/%s: %s\n' "$(basename "$0")" "$*" >&2
  exit 1
}

# Prints the newest Python from 3.11 on that can make a virtual environment; $PYTHON, if set, is the only candidate.
# Each candidate has to run: a name on PATH proves nothing (pyenv's shims, the Windows store's stub).
find_python() {
  local candidate bare='' candidates=(python3.14 python3.13 python3.12 python3.11 python3 python)
  [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
  for candidate in "${candidates[@]}"; do
    "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 || continue
    if "$candidate" -c 'import ensurepip, venv' >/dev/null 2>&1; then
      printf '%s\n' "$candidate"
      return
    fi
    bare=${bare:-$candidate}
  done
  [ -z "$bare" ] || die "$bare cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv"
  die "needs Python 3.11 or later; found none as ${candidates[*]}"
}

# Has pip look at PyTorch's own index too, if it answers: PyPI's build for Linux brings gigabytes of CUDA that no test uses.
prefer_small_torch() {
  local index=https://download.pytorch.org/whl/cpu
  [ "$1" = dev ] && [ "$(uname -s)" = Linux ] && [ -z "${PIP_EXTRA_INDEX_URL:-}" ] || return 0
  if "$python" -c "import urllib.request; urllib.request.urlopen('$index/torch/', timeout=3)" 2>/dev/null; then
    export PIP_EXTRA_INDEX_URL=$index
  fi
}

# ensure_venv NAME EXTRAS [CONSTRAINTS]: has .venv-NAME hold this project, editable, with EXTRAS, and sets $python to
# its interpreter. CONSTRAINTS is a file for pip, made from pyproject.toml alone.
#
# A stamp, written last, says what the environment was made for: the interpreter, its version, where it lies (it does
# not survive a move), the extras and pyproject.toml. One without that very stamp, a half-made one too, is made anew.
ensure_venv() {
  local venv="$root/.venv-$1" extras=$2 constraints=${3:+--constraint=$3} base stamp log
  base=$(find_python) || exit 1
  stamp="$("$base" -c 'import sys; print(sys.base_prefix, sys.version)' | tr '\n' ' ')"
  stamp="$stamp| $venv [$extras] $(cksum <"$root/pyproject.toml")"
  python="$venv/bin/python"
  [ -x "$python" ] || [ ! -x "$venv/Scripts/python.exe" ] || python="$venv/Scripts/python.exe"
  if [ "$(cat "$venv/.stamp" 2>/dev/null)" = "$stamp" ] && "$python" -c '' 2>/dev/null; then
    return
  fi
  printf 'Making %s with %s: zcrecord[%s] (a minute or so, once)\n' "${venv#"$root"/}" "$("$base" -V)" "$extras"
  log=$(mktemp)
  if ! { rm -f "$venv/.stamp" && "$base" -m venv --clear "$venv"; } >"$log" 2>&1; then
    cat "$log" >&2
    rm -f "$log"
    die "could not make the virtual environment $venv"
  fi
  [ -x "$python" ] || python="$venv/Scripts/python.exe"
  prefer_small_torch "$extras"
  # shellcheck disable=SC2086  # mktemp's name, or nothing
  if ! "$python" -m pip install --quiet --no-compile --editable "$root[$extras]" $constraints >"$log" 2>&1; then
    cat "$log" >&2
    rm -f "$log"
    die "pip could not install zcrecord[$extras] into $venv; see above, or try another Python: PYTHON=python3.12 $0"
  fi
  rm -f "$log"
  printf '%s\n' "$stamp" >"$venv/.stamp"
}
