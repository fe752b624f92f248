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
"$place/bin/python" -m pip install --quiet --disable-pip-version-check -r "$here/requirements.txt"
echo "$pinned" >"$place/.installed"
