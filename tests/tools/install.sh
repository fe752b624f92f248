#!/usr/bin/env bash
# The sweep tools, notebooks and workflow engines of docs/tools, in the versions that are pinned beside this file.
# They have a place of their own, because some of what they need disagrees with what the rest of the tests needs.
# That place sees the packages of .venv as well: torch, Lightning, Optuna, joblib, pytest and this checkout.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}") place=$1
main="$(dirname "$place")"
pinned=$(cat "$here/requirements.txt" "$0" | sha256sum)
[ "$pinned" != "$(cat "$place/.installed" 2>/dev/null)" ] || exit 0
echo "Installing sweep tools into $place: 600 MB, a minute, only this once."
"$main/bin/python" -m venv --clear "$place"
ours=$("$main/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
theirs=$("$place/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# addsitedir, and not a bare path: the checkout is found by .pth files of .venv.
echo "import site; site.addsitedir('$ours')" >"$theirs/zz_main_environment.pth"
"$place/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile -r "$here/requirements.txt"

# Tests of tools that no wheel brings: jupyter_client's are in its source, CPython's in a package of Debian's.
started=$PWD jupyter=$(grep '^jupyter-client==' "$here/requirements.txt")
mkdir -p "$place/upstream/jupyter_client" && cd "$place/upstream"
../bin/python -m pip download --quiet --disable-pip-version-check --no-deps --no-build-isolation --no-binary :all: "$jupyter"
tar -xzf jupyter_client-*.tar.gz -C jupyter_client --strip-components 1
version=$(../bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')
mkdir -p cpython && cd cpython
if apt-get -qq -o APT::Sandbox::User="$(id -un)" download "libpython$version-testsuite" >/dev/null; then
    dpkg-deb --fsys-tarfile ./*.deb | tar -x --strip-components 5 "./usr/lib/python$version/test/test_concurrent_futures.py"
else
    echo "No tests of CPython: a test of GPUExecutor will fail. Debian's libpython$version-testsuite has them." >&2
fi
cd "$started"
echo "$pinned" >"$place/.installed"
