#!/usr/bin/env bash
# What the tests need of the system. Installs what is missing where it may, else says what to install.
set -euo pipefail

# A command on PATH or a file (with *), the Debian package that has it, and what it is for.
needed="
cc                                         gcc libc6-dev  stand-ins for the NVML and CUDA libraries
c++                                        g++            a part that deepspeed builds for itself
ip                                         iproute2       cutting the network to a database, one for each document
curl                                       curl           doing what the documents say
jq                                         jq             the same
node                                       nodejs         the same
npm                                        npm            generators of TypeScript clients
chromium                                   chromium       the dashboard in a browser
systemd-analyze                            systemd        reading the units
zsh                                        zsh            completion in it
fish                                       fish           the same
/usr/lib/python3*/ensurepip                python3-venv   installing as docs/install.md says
kubectl                                    kubernetes-client  building the Kubernetes manifests
buildah                                    buildah        building the container image
mmdebstrap                                 mmdebstrap     the base of that image
/usr/sbin/nginx                            nginx          a proxy before the daemon
/usr/sbin/slurmctld                        slurm-wlm      pilots on a real cluster
/usr/sbin/munged                           munge          the same
/usr/lib/*/faketime/libfaketimeMT.so.1     faketime       jumps of the wall clock of a real daemon
"

missing=() told=()
while read -r what rest; do
    [ -n "$what" ] || continue
    packages=${rest%%  *} purpose=${rest##*  }
    case $what in
        /*) compgen -G "$what" >/dev/null && continue ;;
        *) command -v "$what" >/dev/null && continue ;;
    esac
    read -ra words <<<"$packages"
    missing+=("${words[@]}")
    told+=("$packages: $purpose")
done <<<"$needed"

[ ${#missing[@]} -gt 0 ] || exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
else
    echo "Some tests will fail. On Debian and Ubuntu: apt-get install ${missing[*]}" >&2
    printf '  %s\n' "${told[@]}" >&2
fi
