#!/bin/sh
# Becomes one kvferry service: container-entrypoint router|prefill|decode [OPTIONS]
# Chooses what a container must know of itself (its address, its GPU); every other option is a variable KVFERRY_*.
set -eu

role=${1:?router, prefill or decode}
shift
places=${PLACES_FOLDER:-/run/kvferry/places}

# Made on first start. It holds a password, so it is a file and not a variable that Compose would show.
if [ -r /run/kvferry/worker/redis-url ]; then
    KVFERRY_HISTORY_REDIS=$(cat /run/kvferry/worker/redis-url)
    export KVFERRY_HISTORY_REDIS
fi

# Replicas of a service are alike; each takes the first place that no other holds, and the GPU of that place.
# The lock is this process's as long as it lives, whatever ends it.
choose_gpu() {
    count=$(echo "${GPU_IDS:-}" | tr ',' '\n' | grep -c .) || return 0
    [ "$count" -gt 1 ] || return 0
    place=0
    while exec 9>"$places/$role.$place" && ! flock --nonblock 9; do
        place=$((place + 1))
        [ "$place" -lt 256 ] || { echo "no free place for $role in $places" >&2; exit 1; }
    done
    CUDA_VISIBLE_DEVICES=$((place % count))
    export CUDA_VISIBLE_DEVICES
}

case $role in
    router)
        echo http://127.0.0.1:8000 >/tmp/ready-url
        # Published on this machine's loopback only, the API may do without keys.
        case ${BIND:-} in 127.* | localhost | ::1) export KVFERRY_INSECURE="${KVFERRY_INSECURE:-true}" ;; esac
        exec kvferry router --listen 0.0.0.0:8000 --prefill-workers prefill:9001 --decode-workers decode:9002 "$@"
        ;;
    prefill) number=1 ;;
    decode) number=2 ;;
    *)
        echo "'$role' is no service; router, prefill and decode are" >&2
        exit 2
        ;;
esac

choose_gpu
echo "http${KVFERRY_CERTS:+s}://127.0.0.1:920$number" >/tmp/ready-url
# Peers reach this replica, and no other of its name, by its own address.
address=$(hostname -i | cut -d ' ' -f 1)
exec kvferry "$role" --listen "0.0.0.0:900$number" --metrics-listen "0.0.0.0:920$number" \
    --block-listen "tcp://0.0.0.0:910$number" --block-advertise "tcp://$address:910$number" "$@"
