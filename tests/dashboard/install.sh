#!/usr/bin/env bash
# What checks the modules of the page, in the versions that are pinned beside this file.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}") place=$1
pinned=$(cat "$here"/package.json "$here"/package-lock.json | sha256sum)
[ "$pinned" != "$(cat "$place/.installed" 2>/dev/null)" ] || exit 0
echo "Installing the checks of the dashboard into $place: 70 MB, half a minute, only this once."
mkdir -p "$place"
cp "$here"/package.json "$here"/package-lock.json "$place"
npm ci --prefix "$place" --silent --no-audit --no-fund
echo "$pinned" >"$place/.installed"
