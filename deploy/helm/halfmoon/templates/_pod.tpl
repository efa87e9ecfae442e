{{/* The pod of a role: one container, as an unprivileged user, that can write only to its volumes. */}}

{{/* {root, role} */}}
{{- define "halfmoon.pod" -}}
{{- $values := .root.Values }}
{{- $role := index $values .role }}
{{- $hasModel := ne .role "kvstore" }}
{{- $httpPort := ternary "http" "metrics" (eq .role "conductor") }}
{{- $preStop := ternary 5 0 (eq .role "conductor") }}
metadata:
  labels: {{- include "halfmoon.labels" . | nindent 4 }}
  {{- with $role.podAnnotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "halfmoon.fullname" .root }}
  automountServiceAccountToken: false
  # A Service called "…-metrics" would set HALFMOON_METRICS_PORT in every pod of its namespace.
  enableServiceLinks: false
  # preStop, then the drain, then what a process needs to end.
  terminationGracePeriodSeconds: {{ add $role.drainSeconds $preStop 30 }}
  securityContext:
    runAsNonRoot: {{ ne (int $role.runAsUser) 0 }}
    runAsUser: {{ int $role.runAsUser }}
    runAsGroup: {{ int $role.runAsUser }}
    fsGroup: {{ int $role.runAsUser }}
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile: {type: RuntimeDefault}
  {{- with $values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  {{- if $role.hostNetwork }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  {{- with $role.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with $role.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with $role.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $role.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  affinity:
    {{- if $role.affinity }}
    {{- toYaml $role.affinity | nindent 4 }}
    {{- else }}
    podAntiAffinity:
      preferredDuringSchedulingIgnoredDuringExecution:
        - weight: 100
          podAffinityTerm:
            topologyKey: kubernetes.io/hostname
            labelSelector:
              matchLabels: {{- include "halfmoon.selector" . | nindent 16 }}
    {{- end }}
  containers:
    - name: {{ .role }}
      image: {{ include "halfmoon.image" (dict "root" .root "image" $role.image) }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      env: {{- include "halfmoon.environment" . | nindent 8 }}
      ports:
        {{- if eq .role "conductor" }}
        - {name: http, containerPort: 8000}
        {{- end }}
        - {name: metrics, containerPort: {{ int $role.metricsPort }}}
      startupProbe:
        httpGet: {path: {{ ternary "/health" "/ready" (eq .role "conductor") }}, port: {{ $httpPort }}}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: {{ max 1 (div $role.startupSeconds 5) }}
      # A conductor is ready when it knows a prefill and a decode worker, so that an update takes
      # no old one away before; a worker, when it has said in the metadata server that it is there.
      readinessProbe:
        httpGet: {path: /ready, port: {{ $httpPort }}}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 2
      # Answered by the event loop: a process that hangs is made anew.
      livenessProbe:
        httpGet: {path: /health, port: {{ $httpPort }}}
        periodSeconds: 10
        timeoutSeconds: 10
        failureThreshold: 6
      {{- if $preStop }}
      lifecycle:
        # Kubernetes takes a pod out of its Service while it stops it: serve until all have heard.
        preStop: {exec: {command: [sleep, {{ $preStop | quote }}]}}
      {{- end }}
      resources: {{- toYaml $role.resources | nindent 8 }}
      securityContext: {{- include "halfmoon.securityContext" $role | nindent 8 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        {{- if eq ($role.engine | default "") "vllm" }}
        - {name: shm, mountPath: /dev/shm}
        {{- end }}
        {{- if and $hasModel $values.model.claim }}
        - {name: models, mountPath: /models, readOnly: true}
        {{- end }}
        {{- if and (eq .role "conductor") $values.tenants.secret }}
        - {name: tenants, mountPath: /etc/halfmoon, readOnly: true}
        {{- end }}
        {{- if and (eq .role "kvstore") $values.kvstore.disk.enabled }}
        - {name: blocks, mountPath: /var/lib/halfmoon}
        {{- end }}
  volumes:
    # The status file, and downloads from a hub.
    - {name: tmp, emptyDir: {}}
    {{- if eq ($role.engine | default "") "vllm" }}
    # Where vLLM's ranks meet; what is in it counts as the pod's memory.
    - {name: shm, emptyDir: {medium: Memory, sizeLimit: 1Gi}}
    {{- end }}
    {{- if and $hasModel $values.model.claim }}
    - {name: models, persistentVolumeClaim: {claimName: {{ $values.model.claim }}, readOnly: true}}
    {{- end }}
    {{- if and (eq .role "conductor") $values.tenants.secret }}
    - {name: tenants, secret: {secretName: {{ $values.tenants.secret }}}}
    {{- end }}
{{- end }}

{{/* {capabilities}: of a container. */}}
{{- define "halfmoon.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
  {{- with .capabilities }}
  add: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
