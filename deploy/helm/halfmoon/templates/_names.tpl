{{/* What objects and labels are called. */}}

{{- define "halfmoon.fullname" -}}
{{- .Values.fullnameOverride | default .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{/* {root, role}: an object of one role. */}}
{{- define "halfmoon.name" -}}
{{ include "halfmoon.fullname" .root }}-{{ .role }}
{{- end }}

{{/* {root, role}, and {stage} for a member of the group: what its pods are found by; never changes. */}}
{{- define "halfmoon.selector" -}}
app.kubernetes.io/name: halfmoon
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .role }}
{{- if hasKey . "stage" }}
halfmoon/stage: {{ .stage | quote }}
{{- end }}
{{- end }}

{{- define "halfmoon.labels" -}}
{{ include "halfmoon.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end }}

{{/* The Secret with the cluster key: one's own, or the chart's. */}}
{{- define "halfmoon.clusterKeySecret" -}}
{{- .Values.clusterKey.existingSecret | default (include "halfmoon.name" (dict "root" . "role" "cluster-key")) -}}
{{- end }}

{{/* {root, image}: where an image is pulled from. */}}
{{- define "halfmoon.image" -}}
{{- with .root.Values.image.registry }}{{ trimSuffix "/" . }}/{{ end -}}
{{ .image }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}
{{- end }}
