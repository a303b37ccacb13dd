#!/usr/bin/env bash
# Runs every step of docker/Dockerfile in a clean Debian, without Docker:  docker/check.sh STAGE [FOLDER]
#   STAGE   cpu or cuda;  FOLDER  where the root is made (default /tmp/lockstep-docker); it is kept, remove it yourself
# A build argument is an environment variable: TORCH="torch==2.13.0 --no-index --find-links /wheels" WHEELS=/opt/wheels docker/check.sh cpu
# Needs root, debootstrap and the network. Each step is printed with its time; the first that fails ends the check.
set -euo pipefail
stage=${1:?which stage: cpu or cuda} folder=${2:-/tmp/lockstep-docker}
root=$folder/$stage
source=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[ "$(id -u)" = 0 ] || { echo "docker/check.sh: run it as root: it makes a root folder and enters it" >&2; exit 2; }
command -v debootstrap > /dev/null || { echo "docker/check.sh: install debootstrap first" >&2; exit 2; }

mkdir -p "$folder"
if [ ! -e "$folder/base/etc/debian_version" ]; then
  echo "making a clean Debian in $folder/base"
  debootstrap --variant=minbase bookworm "$folder/base" http://deb.debian.org/debian > "$folder/debootstrap.log"
fi
[ ! -e "$root" ] || { echo "docker/check.sh: $root is there already: remove it for a clean check" >&2; exit 2; }
cp -a "$folder/base" "$root"
mount -t proc proc "$root/proc"
mkdir -p "$root/dev/shm" && mount -t tmpfs -o size=1g tmpfs "$root/dev/shm"
trap 'umount "$root/proc" "$root/dev/shm"; [ ! -d "$root/wheels" ] || umount "$root/wheels" 2> /dev/null || true' EXIT
cp /etc/resolv.conf "$root/etc/resolv.conf"
[ ! -e /etc/ssl/certs/ca-certificates.crt ] || { mkdir -p "$root/etc/ssl/certs"; cp /etc/ssl/certs/ca-certificates.crt "$root/tmp/"; }
if [ -n "${WHEELS:-}" ]; then mkdir "$root/wheels"; mount --bind "$WHEELS" "$root/wheels"; fi

declare -A values=()      # ENV and ARG
environment=(HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin DEBIAN_FRONTEND=noninteractive)
[ -z "${PIP_CERT:-}" ] || environment+=(PIP_CERT=/tmp/ca-certificates.crt)
current='' place=/ step=0

expand() { local text=$1 name; for name in "${!values[@]}"; do text=${text//\$\{$name\}/${values[$name]}}; done; printf %s "$text"; }

run_step() {  # WORD REST
  local rest
  case $1 in
    ENV) values[${2%%=*}]=${2#*=}; environment+=("$2") ;;
    ARG) local name=${2%%=*} value=${2#*=}; value=${value%\"}; value=${value#\"}
         values[$name]=${!name:-$value}; environment+=("$name=${values[$name]}") ;;
    WORKDIR) place=$2; mkdir -p "$root$2" ;;
    COPY) rest=$(expand "$2"); read -ra words <<< "$rest"; local to=${words[-1]}; unset 'words[-1]'
          # As Docker does, a folder's content is copied, not the folder: see COPY in the Dockerfile.
          for word in "${words[@]}"; do
            if [ -d "$source/$word" ]; then mkdir -p "$root$to"; cp -r "$source/$word/." "$root$to"; else [[ $to != */ ]] || mkdir -p "$root$to"; cp "$source/$word" "$root$to"; fi
          done ;;
    RUN) chroot "$root" /usr/bin/env -i "${environment[@]}" /bin/sh -c "mkdir -p $place && cd $place && $2" ;;
    ENTRYPOINT) ;;
    *) echo "docker/check.sh: $1 is not known" >&2; return 2 ;;
  esac
}

while IFS= read -r line; do
  while [[ $line == *\\ ]]; do IFS= read -r more; line=${line%\\}${more# }; done
  [[ $line =~ ^([A-Z]+)\ (.*)$ ]] || continue
  word=${BASH_REMATCH[1]} rest=${BASH_REMATCH[2]}
  if [ "$word" = FROM ]; then current=${rest##* }; continue; fi
  [ "$current" = base ] || [ "$current" = "$stage" ] || continue
  step=$((step + 1)) begin=$SECONDS
  echo "--- $step $word $rest"
  if ! run_step "$word" "$rest" > "$folder/step.log" 2>&1; then
    tail -30 "$folder/step.log"; echo "step $step failed: $word $rest" >&2; exit 1
  fi
  tail -1 "$folder/step.log" | cut -c1-160
  echo "    $((SECONDS - begin)) s"
done < "$source/docker/Dockerfile"
echo "all $step steps of $stage ran; the root holds $(du -sxm "$root" | cut -f1) MB"
