{{- define "kvferry.labels" -}}
app.kubernetes.io/name: kvferry
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .role }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{- end }}

{{- define "kvferry.selector" -}}
app.kubernetes.io/name: kvferry
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .role }}
{{- end }}

{{- define "kvferry.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default (printf "gpu-%s" .Chart.AppVersion) }}
{{- end }}

{{/* The ports that docker/entrypoint.sh gives the services. */}}
{{- define "kvferry.ports" -}}
{{- if eq . "router" }}{{ dict "http" 8000 | toJson }}
{{- else if eq . "prefill" }}{{ dict "control" 9001 "blocks" 9101 "metrics" 9201 | toJson }}
{{- else }}{{ dict "control" 9002 "blocks" 9102 "metrics" 9202 | toJson }}{{ end }}
{{- end }}

{{/* Where a worker takes blocks; each rank of decode has a port of its own. */}}
{{- define "kvferry.blockPorts" -}}
{{- $first := get (fromJson (include "kvferry.ports" .role)) "blocks" | int }}
{{- $ranks := get (get .root.Values .role).settings "KVFERRY_TENSOR_PARALLEL" | default 1 | int }}
{{- ternary (dict "port" $first) (dict "port" $first "endPort" (add $first $ranks -1 | int)) (eq $ranks 1) | toJson }}
{{- end }}

{{- define "kvferry.keysSecret" -}}
{{ .Values.apiKeys.existingSecret | default (printf "%s-keys" .Release.Name) }}
{{- end }}

{{/* The secret with Redis' URL; empty without a Redis. */}}
{{- define "kvferry.redisSecret" -}}
{{- if .Values.redis.existingSecret }}{{ .Values.redis.existingSecret }}
{{- else if .Values.redis.bundled }}{{ .Release.Name }}-redis{{ end }}
{{- end }}

{{/* A pod's security; the user is the image's. */}}
{{- define "kvferry.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "kvferry.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* Variables that every service has. */}}
{{- define "kvferry.env" -}}
- {name: KVFERRY_MODEL, value: {{ .root.Values.model | quote }}}
- {name: KVFERRY_CERTS, value: /run/kvferry/certs}
- {name: KVFERRY_LOG_FORMAT, value: json}
- {name: KVFERRY_LOG_LEVEL, value: {{ .root.Values.logLevel | quote }}}
- {name: KVFERRY_SHUTDOWN_TIMEOUT_S, value: {{ .root.Values.drainSeconds | quote }}}
{{- with .root.Values.otlpEndpoint }}
- {name: KVFERRY_OTLP_ENDPOINT, value: {{ . | quote }}}
{{- end }}
{{- with .root.Values.huggingFaceSecret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ . }}, key: token}}
{{- end }}
{{- if and (ne .role "decode") (include "kvferry.redisSecret" .root) }}
- name: KVFERRY_HISTORY_REDIS
  valueFrom: {secretKeyRef: {name: {{ include "kvferry.redisSecret" .root }}, key: url}}
{{- end }}
{{- range $name, $value := (index .root.Values .role).settings }}
- {name: {{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- end }}

{{/* A role's folder of kvferry certs; with cert-manager the TLS files are its secret's. */}}
{{- define "kvferry.certsVolume" -}}
name: {{ ternary "metrics-certs" "certs" (eq .role "metrics") }}
projected:
  defaultMode: 0440
  sources:
{{- if eq .root.Values.certs.from "cert-manager" }}
    - secret:
        name: {{ .root.Release.Name }}-tls-{{ .role }}
        items:
          - {key: ca.crt, path: ca.pem}
          - {key: tls.crt, path: tls.pem}
          - {key: tls.key, path: tls.key}
{{- if has .role (list "prefill" "decode") }}
    - secret:
        name: {{ .root.Release.Name }}-certs-{{ .role }}
        items:
          - {key: curve.key, path: curve.key}
          - {key: prefill.pub, path: prefill.pub}
          - {key: decode.pub, path: decode.pub}
{{- end }}
{{- else }}
    - secret: {name: {{ .root.Release.Name }}-certs-{{ .role }}}
{{- end }}
{{- end }}

{{/* A worker answers only who has the certificate of metrics, so its probes run in its container. */}}
{{- define "kvferry.probe" -}}
{{- if eq .role "router" -}}
httpGet: {path: {{ .path }}, port: http}
{{- else -}}
exec: {command: [python, -I, /usr/local/lib/kvferry/healthcheck.py, {{ .path }}]}
{{- end }}
{{- end }}

{{- define "kvferry.probes" -}}
startupProbe:
  {{ include "kvferry.probe" (dict "role" .role "path" (ternary "/health" "/ready" (eq .role "router"))) }}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ div .root.Values.startSeconds 5 }}
readinessProbe:
  {{ include "kvferry.probe" (dict "role" .role "path" "/ready") }}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 2
livenessProbe:
  {{ include "kvferry.probe" (dict "role" .role "path" "/health") }}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end }}

{{/* Pods of a role stand on different nodes and zones as far as possible. */}}
{{- define "kvferry.spread" -}}
{{- range $key := list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
- maxSkew: 1
  topologyKey: {{ $key }}
  whenUnsatisfiable: ScheduleAnyway
  labelSelector: {matchLabels: {{ fromYaml (include "kvferry.selector" $) | toJson }}}
{{- end }}
{{- end }}
