# Sourced by the scripts beside it: `environment EXTRA` makes .venv hold the package with that
# extra ("" for none), and puts it first in PATH. Nothing is installed twice.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv="$root/.venv"

environment() {
    local extra=$1 python=${PYTHON:-python3} stamp
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
        echo "rawpaged needs Python 3.10 or newer; '$python' is not. Set PYTHON to one." >&2
        return 1
    fi
    stamp="$venv/installed-${extra:-base}-$(cat "$root/setup.cfg" "$root/pyproject.toml" \
        <("$python" --version) | sha256sum | cut -c1-16)"
    mkdir -p "$venv"
    (
        flock 9  # two scripts at once: the second waits, then finds the stamp
        if [ ! -e "$stamp" ]; then
            install_package "$python" "$extra" && touch "$stamp"
        fi
    ) 9>"$venv/.lock" || return 1
    PATH="$venv/bin:$PATH"
}

install_package() {
    local python=$1 extra=$2
    echo "rawpaged: installing into $venv (once)" >&2
    if ! "$python" -m venv "$venv"; then
        echo "'$python -m venv' failed; on Debian: apt-get install python3-venv" >&2
        return 1
    fi
    "$venv/bin/python" -m pip install --quiet --editable "$root${extra:+[$extra]}" || return 1
    # In the folder that holds the checkout, `import rawpaged` would find the checkout instead of
    # the package in it: what pip leaves is asked after folders, a path is one of them.
    echo "$root" >"$("$venv/bin/python" -c \
        'import sysconfig; print(sysconfig.get_path("purelib"))')/rawpaged-checkout.pth"
}
