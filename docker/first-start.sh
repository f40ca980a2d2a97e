#!/bin/sh
# Makes what must be secret and differ between deployments: certificate authorities, the services' keys, Redis'
# certificate and ACL, Grafana's password. Runs before everything else at each start, and leaves alone what is there already.
# Each folder is a volume that only its readers mount, so the files in it are readable by any user.
set -eu
umask 022

redis=/run/kvferry/redis
worker=/run/kvferry/worker
monitoring=/run/kvferry/monitoring
certs=/run/kvferry/certs
days=3650

random() { openssl rand -hex 24; }

# A file appears whole or not at all: a start that was interrupted is made good by the next.
if [ ! -s "$worker/redis-url" ]; then
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days "$days" \
        -subj '/CN=kvferry' -keyout /tmp/ca.key -out "$worker/ca.pem" \
        -addext 'basicConstraints=critical,CA:TRUE' -addext 'keyUsage=critical,keyCertSign' 2>/dev/null
    openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes \
        -subj '/CN=redis' -keyout "$redis/redis.key" -out /tmp/redis.csr 2>/dev/null
    printf 'subjectAltName=DNS:redis,DNS:localhost\nextendedKeyUsage=serverAuth\n' >/tmp/redis.ext
    openssl x509 -req -in /tmp/redis.csr -CA "$worker/ca.pem" -CAkey /tmp/ca.key -CAcreateserial \
        -CAserial /tmp/ca.srl -days "$days" -extfile /tmp/redis.ext -out "$redis/redis.pem" 2>/dev/null
    # Nothing else is ever signed.
    rm /tmp/ca.key
    chmod 0644 "$redis/redis.key"
    cp "$worker/ca.pem" "$redis/ca.pem"

    password=$(random)
    # The services may use keys of their own and no command that harms a server; health checks may ping.
    cat >"$redis/users.acl" <<ACL
user default off
user health on nopass resetkeys -@all +ping
user kvferry on >$password ~kvferry:* &kvferry:* +@all -@admin -@dangerous +info +keys
ACL
    echo "rediss://kvferry:$password@redis:6379/0?ssl_ca_certs=$worker/ca.pem" >"$worker/redis-url.part"
    mv "$worker/redis-url.part" "$worker/redis-url"
fi

# Each service gets the keys of its role. The last file to be copied says that all are there.
if [ ! -s "$certs/decode/tls.pem" ] || [ ! -s "$certs/metrics/tls.pem" ]; then
    kvferry certs /tmp/certs --days "$days" >/dev/null
    # Nothing else is ever signed.
    rm -r /tmp/certs/ca
    for role in router prefill metrics decode; do cp -p /tmp/certs/$role/* "$certs/$role/"; done
    # Prometheus is another user.
    chmod 0644 "$certs/metrics/tls.key"
    rm -r /tmp/certs
fi

[ -s "$monitoring/grafana-password" ] || random >"$monitoring/grafana-password"

# Prometheus reads the router's metrics with a key for nothing else. The router gets its hash.
[ -s "$monitoring/metrics-key" ] || random >"$monitoring/metrics-key"
hash=$(tr -d '\n' <"$monitoring/metrics-key" | openssl dgst -sha256 -r | cut -d ' ' -f 1)
cat "${API_KEYS_FILE:-/run/kvferry/api-keys.toml}" >"$worker/keys.part"
printf '\n[[key]]\nname = "prometheus"\nhash = "sha256:%s"\nscopes = ["metrics"]\n' "$hash" >>"$worker/keys.part"
mv "$worker/keys.part" "$worker/keys.toml"
rm -f "$monitoring/api-key" # of earlier versions, a user's key
