{{/* Environment variables of a service: what the chart knows, then what the values set. */}}

{{/* {root, role}, and {stage} for a member of the group */}}
{{- define "halfmoon.environment" -}}
{{- $values := .root.Values }}
{{- $role := index $values .role }}
# A pod's name is its worker's: a node of the StatefulSet finds its disk by it.
- name: HALFMOON_WORKER_ID
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: HALFMOON_HOST
{{- if eq .role "conductor" }}
  value: 0.0.0.0
{{- else }}
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
# Pods share no memory, even on one node.
- name: HALFMOON_HOST_ID
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
{{- end }}
{{- $ours := and $values.trialRedis.enabled (not $values.metadata.secret.name) (not $values.metadata.url) }}
{{- if $ours }}
- name: TRIAL_REDIS_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ include "halfmoon.name" (dict "root" .root "role" "redis") }}, key: password}}
{{- end }}
- name: HALFMOON_METADATA
{{- if $values.metadata.secret.name }}
  valueFrom: {secretKeyRef: {name: {{ $values.metadata.secret.name }}, key: {{ $values.metadata.secret.key }}}}
{{- else if $values.metadata.url }}
  value: {{ $values.metadata.url | quote }}
{{- else if $ours }}
  value: redis://:$(TRIAL_REDIS_PASSWORD)@{{ include "halfmoon.name" (dict "root" .root "role" "redis") }}:6379/0
{{- else }}
{{- fail "no metadata server: set metadata.url (redis://host:6379/0 or etcd://host:2379) or metadata.secret.name, or trialRedis.enabled=true for a trial" }}
{{- end }}
- {name: HALFMOON_METRICS_PORT, value: {{ $role.metricsPort | int | quote }}}
- {name: HALFMOON_DRAIN_S, value: {{ $role.drainSeconds | int | quote }}}
{{- if eq .role "conductor" }}
- {name: HALFMOON_HTTP_PORT, value: "8000"}
# With API keys any name is answered, unless some are listed.
{{- if or $role.allowedHosts (not $values.tenants.secret) }}
{{- $names := list }}
{{- range list (include "halfmoon.fullname" .root) (include "halfmoon.name" .) }}
{{- $inside := printf "%s.%s" . $.root.Release.Namespace }}
{{- $names = concat $names (list . $inside (printf "%s.svc" $inside) (printf "%s.svc.cluster.local" $inside)) }}
{{- end }}
- {name: HALFMOON_ALLOWED_HOSTS, value: {{ concat $names $role.allowedHosts | join "," | quote }}}
{{- end }}
{{- if $values.tenants.secret }}
- {name: HALFMOON_TENANTS, value: /etc/halfmoon/{{ $values.tenants.key }}}
{{- end }}
{{- end }}
{{- if eq .role "kvstore" }}
{{- with $values.kvstore.disk }}
{{- if .enabled }}
- {name: HALFMOON_DISK_PATH, value: /var/lib/halfmoon/blocks}
# The file system keeps some for itself.
- {name: HALFMOON_DISK_MIB, value: {{ div (mul .sizeGiB 1024 9) 10 | quote }}}
{{- end }}
{{- end }}
{{- else }}
- {name: HALFMOON_MODEL, value: {{ $values.model.source | quote }}}
{{- with $values.model.servedName }}
- {name: HALFMOON_SERVED_MODEL_NAME, value: {{ . | quote }}}
{{- end }}
{{- if ne .role "conductor" }}
- {name: HALFMOON_DTYPE, value: {{ $values.model.dtype | quote }}}
- {name: HALFMOON_BLOCK_SIZE, value: {{ $values.model.blockSize | int | quote }}}
- {name: HALFMOON_ENGINE, value: {{ $role.engine | quote }}}
{{- $options := dict }}
{{- range $name, $value := $role.engineOptions }}
{{- $_ := set $options $name (include "halfmoon.number" $value) }}
{{- end }}
- {name: HALFMOON_ENGINE_OPTIONS, value: {{ $options | toJson | quote }}}
{{- end }}
{{- if hasKey . "stage" }}
- {name: HALFMOON_GROUP, value: group-0}
- {name: HALFMOON_STAGE, value: {{ printf "%d/%d" .stage (int $role.group.stages) | quote }}}
- {name: HALFMOON_STAGE_LAYERS_ONLY, value: {{ $role.group.layersOnly | quote }}}
{{- end }}
{{- with $values.model.hubToken }}
{{- if .secret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .secret }}, key: {{ .key }}}}
{{- end }}
{{- end }}
{{- end }}
{{- if $values.clusterKey.enabled }}
- name: HALFMOON_CLUSTER_KEY
  valueFrom: {secretKeyRef: {name: {{ include "halfmoon.clusterKeySecret" .root }}, key: {{ $values.clusterKey.key }}}}
{{- else }}
- {name: HALFMOON_ALLOW_OPEN_NETWORK, value: "true"}
{{- end }}
{{- $settings := dict }}
{{- range list $values.settings $role.settings }}
{{- range $name, $value := . }}{{ $_ := set $settings $name $value }}{{ end }}
{{- end }}
{{- range $name, $value := $settings }}
- {name: HALFMOON_{{ upper $name }}, value: {{ include "halfmoon.number" $value | quote }}}
{{- end }}
{{- range $name, $value := $values.environment }}
- {name: {{ $name }}, value: {{ include "halfmoon.number" $value | quote }}}
{{- end }}
{{- end }}

{{/* A value as text: helm reads every number as a float, and writes 8388608 as 8.388608e+06. */}}
{{- define "halfmoon.number" -}}
{{- if and (kindIs "float64" .) (eq . (floor .)) }}{{ int64 . }}{{ else }}{{ . }}{{ end -}}
{{- end }}
