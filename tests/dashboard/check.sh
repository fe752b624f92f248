#!/usr/bin/env bash
# Checks the modules of the page: format, lint, and types, those of the API made of the OpenAPI document of this checkout; and the
# dashboard for Grafana by the types of Grafana's own schema.
# `check.sh PLACE --fix` formats them. PLACE is where install.sh has put the tools.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
place=$PWD/$1 page=server/gpulease_server/dashboard/page here=tests/dashboard
tool() { node "$place/node_modules/$@"; }

if [ "${2:-}" = --fix ]; then
    tool prettier/bin/prettier.cjs --config $here/prettier.json --write --log-level warn "$page/**/*.js" "!$page/vendor/**"
fi
# The copy has types in place of the libraries.
copy=$place/checked
rm -rf "$copy"
mkdir -p "$copy"
cp -r $page $here/eslint.config.js $here/tsconfig.json $here/prettier.json "$copy"
rm -r "$copy/page/vendor"
cp -r $here/types "$copy/page/vendor"
"$(dirname "$place")/bin/python" -m tests.dashboard.openapi >"$copy/openapi.json"
cd "$copy"
tool openapi-typescript/bin/cli.js openapi.json --output page/vendor/openapi.d.ts >/dev/null 2>openapi.log || { cat openapi.log >&2; exit 1; }
tool prettier/bin/prettier.cjs --config prettier.json --check --log-level warn "page/**/*.js"
tool eslint/bin/eslint.js --max-warnings 0 page
tool typescript/bin/tsc --project tsconfig.json
grafana=$place/grafana
rm -rf "$grafana"
mkdir -p "$grafana/types"
cat "$OLDPWD/$here/grafana.ts" "$OLDPWD/deploy/grafana/gpulease.json" >"$grafana/dashboard.ts"
tool typescript/bin/tsc --noEmit --strict --skipLibCheck --module esnext --moduleResolution bundler --target esnext \
    --typeRoots "$grafana/types" "$grafana/dashboard.ts"
