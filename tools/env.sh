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

# prepare_download EXTRAS: sets $size to what pip will fetch and install. Has pip look at PyTorch's own index, too, if that
# answers: PyPI's build for Linux brings gigabytes of CUDA that no test uses.
prepare_download() {
  local index=https://download.pytorch.org/whl/cpu
  size='0.1 GB to download, 0.3 GB on the disk'
  [ "$1" = dev ] || return 0
  size='0.6 GB to download, 3 GB on the disk'
  [ "$(uname -s)" = Linux ] || return 0
  if [ -n "${PIP_EXTRA_INDEX_URL:-}" ]; then
    size="$size; 3.1 and 9 GB if pip finds no torch without CUDA"
  elif "$base" -c "import urllib.request; urllib.request.urlopen('$index/torch/', timeout=3)" 2>/dev/null; then
    export PIP_EXTRA_INDEX_URL=$index
  else
    size="up to 3.1 GB to download and 9 GB on the disk, most of it CUDA: $index does not answer"
  fi
}

# ensure_venv NAME EXTRAS [CONSTRAINTS]: has .venv-NAME hold this project, editable, with EXTRAS, and sets $python to
# its interpreter. CONSTRAINTS is a file for pip, made from pyproject.toml alone.
#
# A stamp, written last, says what the environment was made for: the interpreter, its version, where it lies (it does
# not survive a move), the extras and pyproject.toml. One without that very stamp, a half-made one too, is made anew.
ensure_venv() {
  local venv="$root/.venv-$1" extras=$2 constraints=${3:+--constraint=$3} base stamp log size
  base=$(find_python) || exit 1
  stamp="$("$base" -c 'import sys; print(sys.base_prefix, sys.version)' | tr '\n' ' ')"
  stamp="$stamp| $venv [$extras] $(cksum <"$root/pyproject.toml")"
  python="$venv/bin/python"
  [ -x "$python" ] || [ ! -x "$venv/Scripts/python.exe" ] || python="$venv/Scripts/python.exe"
  if [ "$(cat "$venv/.stamp" 2>/dev/null)" = "$stamp" ] && "$python" -c '' 2>/dev/null; then
    return
  fi
  "$base" -c 'import sysconfig; raise SystemExit("musl" in str(sysconfig.get_config_var("SOABI")))' ||
    die "$base is built for musl, and PyPI has no ONNX Runtime for it; use a system with glibc, such as Debian's container"
  prepare_download "$extras"
  printf 'Making %s with %s: zcrecord[%s], once (%s)\n' "${venv#"$root"/}" "$("$base" -V)" "$extras" "$size"
  log=$(mktemp)
  if ! { rm -f "$venv/.stamp" && "$base" -m venv --clear "$venv"; } >"$log" 2>&1; then
    cat "$log" >&2
    rm -f "$log"
    die "could not make the virtual environment $venv"
  fi
  [ -x "$python" ] || python="$venv/Scripts/python.exe"
  mkdir "$venv/tmp" # where wheels are unpacked: /tmp may be memory
  # shellcheck disable=SC2086  # mktemp's name, or nothing
  if ! TMPDIR="$venv/tmp" "$python" -m pip install --quiet --no-compile --editable "$root[$extras]" $constraints \
    >"$log" 2>&1; then
    cat "$log" >&2
    rm -f "$log"
    die "pip could not install zcrecord[$extras] into $venv; see above, or try another Python: PYTHON=python3.12 $0"
  fi
  rm -rf "$log" "$venv/tmp"
  printf '%s\n' "$stamp" >"$venv/.stamp"
}
