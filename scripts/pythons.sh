#!/usr/bin/env bash
# Run `make work` and `make test` under other Pythons: Debian 13's 3.13 and Debian sid's 3.14.
#     scripts/pythons.sh [FOLDER [COMMAND]]
# FOLDER (build/pythons) keeps a Debian for each, made by debootstrap, with a clone of HEAD and its
# .venv inside; a second run goes on with what is there. COMMAND replaces `make test`.
# SUITES="trixie" leaves out sid, MIRROR= names another mirror of Debian.
# Needs root, Linux, 12 GB for each Debian, and an hour. Mounts stand in a namespace that only this
# script's processes see, and Linux ends all of these with the script, however it ends.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
packages=make,git,ca-certificates,gcc,libc6-dev,procps,iproute2

stop() {
    echo "$*" >&2
    exit 1
}

python_of() {
    case $1 in
        sid) echo python3.14 ;;
        *) echo python3 ;;
    esac
}

# Make the Debian of one suite, unless it is there.
make_debian() {
    local suite=$1 root=$2 python
    [ -d "$root" ] && return
    python=$(python_of "$suite")
    rm -rf "$root.part"
    debootstrap --variant=minbase --include="$python,$python-venv,$python-dev,$packages" \
        "$suite" "$root.part" ${MIRROR:+"$MIRROR"} ||
        stop "debootstrap could not make Debian $suite: $root.part/debootstrap/debootstrap.log"
    mv "$root.part" "$root"
}

# The files and folders of this machine that the network and pip need there, at the same place:
# pip's configuration, and whatever lies here that it names (of an index, the folder around it).
shared_paths() {
    printf '%s\n' /etc/resolv.conf /etc/hosts /etc/ssl/certs/ca-certificates.crt
    { python3 -m pip config debug 2>/dev/null || true; } |
        grep -oE "/[^ ,'\"]+" | sed -E 's#^/+#/#; s#(.)/simple/?$#\1#' | sort -u
}

# Runs as the first process of the namespace, and buries orphans as an init does.
inside() {
    local root=$1 path
    shift
    mount --rbind /sys "$root/sys"
    mount --bind /dev "$root/dev"
    mount -t proc proc "$root/proc"
    mount -t tmpfs tmpfs "$root/dev/shm"
    mount -t devpts -o newinstance,ptmxmode=0666,mode=0620 devpts "$root/dev/pts"
    while read -r path; do
        [ -e "$path" ] || continue
        if [ -d "$path" ]; then
            mkdir -p "$root$path"
        else
            mkdir -p "$root$(dirname "$path")"
            [ -e "$root$path" ] || : >"$root$path"
        fi
        mount --bind "$path" "$root$path"
    done < <(shared_paths)
    mkdir -p "$root$HOME"
    env -u PYTHONPATH -u VIRTUAL_ENV -u MAKEFLAGS -u MFLAGS -u MAKELEVEL -u TMPDIR \
        -u SUITES -u MIRROR \
        LANG=C.UTF-8 PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
        chroot "$root" sh -ec 'cd /ranklab; "$@"' sh "$@"
}

# Run a command in the checkout of a Debian; its output goes to the screen and to a log.
run() {
    local root=$1 log=$2
    shift 2
    setpriv --pdeathsig KILL unshare --mount --pid --fork --kill-child \
        bash "$0" --inside "$root" "$@" </dev/null 2>&1 | tee -a "$log"
}

main() {
    local folder failed=0 report="" suite root log python state closing tool
    [ "$(id -u)" = 0 ] || stop "Other Pythons need root: debootstrap, chroot and mounts do."
    for tool in debootstrap unshare setpriv; do
        command -v $tool >/dev/null || stop "No $tool here: apt install debootstrap util-linux"
    done
    folder=${1:-$here/build/pythons}
    shift || true
    [ $# -gt 0 ] || set -- make test
    trap 'exit 130' INT  # or bash would go on with the next Debian
    mkdir -p "$folder"
    folder=$(cd "$folder" && pwd)
    for suite in ${SUITES:-trixie sid}; do
        root=$folder/$suite log=$folder/$suite.log python=$(python_of "$suite")
        make_debian "$suite" "$root"
        git init -q "$root/ranklab"
        git -C "$root/ranklab" fetch -q --update-shallow "$here" HEAD
        git -C "$root/ranklab" checkout -qfB main FETCH_HEAD
        git -C "$root/ranklab" clean -qfd
        : >"$log"
        state=passed
        run "$root" "$log" env PYTHON="$python" make work &&
            run "$root" "$log" env PYTHON="$python" "$@" || state=FAILED failed=1
        closing=$(grep -E '^=+ .* in [0-9.]+s.* =+$' "$log" | tail -1) || closing=$(tail -1 "$log")
        report+="$suite, $(chroot "$root" "$python" -V), $state: $closing"$'\n'
    done
    printf '\n%s' "$report"
    return $failed
}

case ${1:-} in
    --inside) inside "${@:2}" ;;
    *) main "$@" ;;
esac
exit  # so bash reads no further in a file that changed meanwhile
