# Sourced by the other scripts: prepare_env [EXTRA ...] makes or refreshes .venv and sets $python to its interpreter.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3 python3.13 python3.12 python3.11 python; do
        [ -n "$candidate" ] || continue
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return 0
        fi
    done
    echo "error: Python 3.11, 3.12 or 3.13 is needed and was not found; install one or name it: PYTHON=/path/to/python" >&2
    return 1
}

prepare_env() {
    local base
    base=$(find_python) || exit 1
    python=$("$base" "$root/scripts/setup_env.py" "$@") || exit $?
}
