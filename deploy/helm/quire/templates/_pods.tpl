{{/* Fields of the pod specs of engines and routers. Call with (dict "root" $ "values" .Values.engine). */}}
{{- define "quire.podFields" -}}
serviceAccountName: {{ include "quire.serviceAccountName" .root }}
automountServiceAccountToken: false
# Otherwise the Services of the namespace become environment variables, some with the names of quire's options.
enableServiceLinks: false
securityContext: {{- toYaml .root.Values.podSecurityContext | nindent 2 }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.topologySpreadConstraints }}
topologySpreadConstraints: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "quire.containerFields" -}}
image: {{ include "quire.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext: {{- toYaml .Values.containerSecurityContext | nindent 2 }}
command: [quire]
{{- end -}}

{{/* Environment of what asks engines and the router's admin API. */}}
{{- define "quire.routerKeys" -}}
- name: HOME
  value: /tmp
{{- if include "quire.hasApiKey" . }}
- name: QUIRE_ROUTER_BACKEND_KEY
  {{- include "quire.apiKeyFrom" . | nindent 2 }}
{{- end }}
{{- with .Values.router.adminKey }}
{{- if .existingSecret }}
- name: QUIRE_ROUTER_ADMIN_KEY
  valueFrom:
    secretKeyRef:
      name: {{ .existingSecret }}
      key: {{ .key }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Metadata of the pods of an engine. Call with (dict "root" $ "role" "server"). */}}
{{- define "quire.engineMetadata" -}}
{{- $values := .root.Values -}}
labels:
  {{- include "quire.selectorLabels" (dict "root" .root "component" (ternary "prefill" "engine" (eq .role "prefill"))) | nindent 2 }}
  quire-role: {{ .role }}
  {{- with $values.commonLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- if and $values.inferencePool.enabled (eq .role "server") }}
  {{- toYaml $values.inferencePool.labels | nindent 2 }}
  {{- end }}
  {{- with $values.engine.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- if or $values.engine.podAnnotations $values.apiKey.value }}
annotations:
  {{- if $values.apiKey.value }}
  checksum/api-key: {{ sha256sum $values.apiKey.value }}
  {{- end }}
  {{- with $values.engine.podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Spec of the pods of an engine. A worker of a LeaderWorkerSet has /health only. */}}
{{- define "quire.engineSpec" -}}
{{- $values := .root.Values -}}
{{- $engine := $values.engine -}}
{{- $probes := $engine.probes -}}
{{- $ready := ternary "/health" "/ready" (eq .role "worker") -}}
{{- include "quire.podFields" (dict "root" .root "values" $engine) }}
{{- with $engine.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $engine.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
# --drain-grace, --drain-timeout, and 5 s to end.
terminationGracePeriodSeconds: {{ add $engine.drain.graceSeconds $engine.drain.timeoutSeconds 5 }}
{{- if $values.prefill.enabled }}
initContainers:
  # quire refuses a secret that a group may read, as Kubernetes mounts it with an fsGroup.
  - name: transfer-secret
    image: {{ include "quire.image" .root | quote }}
    imagePullPolicy: {{ $values.image.pullPolicy }}
    securityContext: {{- toYaml $values.containerSecurityContext | nindent 6 }}
    command: [install, -m, "600", /secret/{{ $values.prefill.transferSecret.key }}, /tmp/transfer-secret]
    resources: {{- include "quire.engineResources" .root | nindent 6 }}
    volumeMounts:
      - name: tmp
        mountPath: /tmp
      - name: transfer-secret
        mountPath: /secret
        readOnly: true
{{- end }}
containers:
  - name: quire
    {{- include "quire.containerFields" .root | nindent 4 }}
    args: {{- include "quire.engineArguments" .root | nindent 6 }}
    env: {{- include "quire.engineEnvironment" .root | nindent 6 }}
    ports:
      - name: http
        containerPort: {{ $engine.port }}
      {{- if $engine.kvEvents.enabled }}
      - name: kv-events
        containerPort: {{ $engine.kvEvents.port }}
      - name: kv-replay
        containerPort: {{ $engine.kvEvents.replayPort }}
      {{- end }}
      {{- if eq .role "prefill" }}
      - name: kv-transfer
        containerPort: {{ $values.prefill.port }}
      {{- end }}
      {{- if $values.leaderWorkerSet.enabled }}
      - name: rendezvous
        containerPort: {{ $values.leaderWorkerSet.port }}
      {{- end }}
    # Until the model is loaded.
    startupProbe: {{- include "quire.probe" (dict "path" $ready "period" $probes.periodSeconds "seconds" $probes.startupSeconds) | nindent 6 }}
    # Takes new requests: not while it drains.
    readinessProbe: {{- include "quire.probe" (dict "path" $ready "period" $probes.periodSeconds "seconds" $probes.periodSeconds) | nindent 6 }}
    # The engine makes progress. The server restarts a dead engine itself, so this waits longer than that takes.
    livenessProbe: {{- include "quire.probe" (dict "path" "/health" "period" $probes.periodSeconds "seconds" (default $probes.startupSeconds $probes.livenessSeconds)) | nindent 6 }}
    resources: {{- include "quire.engineResources" .root | nindent 6 }}
    volumeMounts: {{- include "quire.engineMounts" .root | nindent 6 }}
volumes: {{- include "quire.engineVolumes" .root | nindent 2 }}
{{- end -}}

{{- define "quire.engineEnvironment" -}}
{{- $storage := .Values.model.storage -}}
- name: HOME
  value: /tmp
# For a runAsUser that the image does not know.
- name: USER
  value: quire
- name: XDG_CACHE_HOME
  value: /cache
- name: TRITON_CACHE_DIR
  value: /cache/triton
- name: HF_HOME
  value: {{ ternary "/cache/huggingface" "/models/huggingface" (and (eq $storage.type "existingClaim") $storage.readOnly) }}
{{- if include "quire.hasApiKey" . }}
- name: QUIRE_API_KEY
  {{- include "quire.apiKeyFrom" . | nindent 2 }}
{{- end }}
{{- with .Values.model.hubToken }}
{{- if .existingSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ .existingSecret }}
      key: {{ .key }}
{{- end }}
{{- end }}
{{- if .Values.leaderWorkerSet.enabled }}
- name: MASTER_PORT
  value: {{ .Values.leaderWorkerSet.port | quote }}
{{- end }}
{{- with .Values.engine.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "quire.engineResources" -}}
{{- $resources := deepCopy .Values.engine.resources -}}
{{- $gpu := .Values.engine.gpu -}}
{{- if $gpu.count -}}
{{- $limits := default dict $resources.limits -}}
{{- $_ := set $limits $gpu.resourceName (int $gpu.count) -}}
{{- $_ := set $resources "limits" $limits -}}
{{- end -}}
{{ toYaml $resources }}
{{- end -}}

{{- define "quire.engineMounts" -}}
{{- $storage := .Values.model.storage -}}
- name: tmp
  mountPath: /tmp
- name: cache
  mountPath: /cache
- name: models
  mountPath: /models
  {{- if and (eq $storage.type "existingClaim") $storage.readOnly }}
  readOnly: true
  {{- end }}
{{- if .Values.engine.dataVolume.enabled }}
- name: data
  mountPath: /data
{{- end }}
{{- if .Values.engine.sharedMemorySize }}
- name: shared-memory
  mountPath: /dev/shm
{{- end }}
{{- end -}}

{{/* Volumes that are not claims of a StatefulSet. */}}
{{- define "quire.engineVolumes" -}}
{{- $storage := .Values.model.storage -}}
- name: tmp
  emptyDir: {{- include "quire.emptyDir" .Values.engine.tmpSize | nindent 4 }}
- name: cache
  emptyDir: {{- include "quire.emptyDir" .Values.engine.cacheSize | nindent 4 }}
{{- if eq $storage.type "emptyDir" }}
- name: models
  emptyDir: {{- include "quire.emptyDir" $storage.size | nindent 4 }}
{{- else if eq $storage.type "existingClaim" }}
- name: models
  persistentVolumeClaim:
    claimName: {{ $storage.existingClaim }}
    readOnly: {{ $storage.readOnly }}
{{- end }}
{{- if .Values.prefill.enabled }}
- name: transfer-secret
  secret:
    secretName: {{ .Values.prefill.transferSecret.existingSecret }}
{{- end }}
{{- with .Values.engine.sharedMemorySize }}
- name: shared-memory
  emptyDir:
    medium: Memory
    sizeLimit: {{ . }}
{{- end }}
{{- end -}}

{{- define "quire.emptyDir" -}}
{{- if . -}}
sizeLimit: {{ . }}
{{- else -}}
{}
{{- end -}}
{{- end -}}
