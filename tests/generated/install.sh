#!/usr/bin/env bash
# The generators of docs/generated-clients.md and what their clients need, in the versions that are pinned beside this file.
# They have a place of their own, because what they need disagrees with what the rest of the tests needs.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}") place=$1
pinned=$(cat "$here"/package.json "$here"/package-lock.json "$here"/requirements.txt | sha256sum)
[ "$pinned" != "$(cat "$place/.installed" 2>/dev/null)" ] || exit 0
echo "Installing generators of clients into $place: 100 MB, a minute, only this once."
mkdir -p "$place"
cp "$here"/package.json "$here"/package-lock.json "$place"
npm ci --prefix "$place" --silent --no-audit --no-fund
"$(dirname "$place")/bin/python" -m venv --clear "$place/python"
"$place/python/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile -r "$here/requirements.txt"
echo "$pinned" >"$place/.installed"
