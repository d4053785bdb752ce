{{/* The prefix of all names; short enough for the suffixes of pods. */}}
{{- define "quire.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "quire.engineName" -}}
{{ include "quire.fullname" . }}-engine
{{- end -}}

{{- define "quire.routerName" -}}
{{ include "quire.fullname" . }}-router
{{- end -}}

{{/* The name of the prefill servers, and of their headless service. */}}
{{- define "quire.prefillName" -}}
{{ include "quire.fullname" . }}-prefill
{{- end -}}

{{/* The values for the pods of prefill servers, as JSON: those of engines are replaced. */}}
{{- define "quire.prefillValues" -}}
{{- $values := deepCopy .Values -}}
{{- $_ := set $values.engine "options" (mergeOverwrite $values.engine.options $values.prefill.options) -}}
{{- $_ := set $values.engine "replicas" $values.prefill.replicas -}}
{{- range $name := list "resources" "nodeSelector" -}}
{{- $_ := set $values.engine $name (default (get $values.engine $name) (get $values.prefill $name)) -}}
{{- end -}}
{{- $_ := set $values.engine.kvEvents "enabled" false -}}
{{- $_ := set $values.engine.dataVolume "enabled" false -}}
{{- $_ := set $values.inferencePool "enabled" false -}}
{{- $_ := set $values "role" "prefill" -}}
{{- toJson $values -}}
{{- end -}}

{{/* The headless service of the engines. The controller of a LeaderWorkerSet makes one with the set's name itself. */}}
{{- define "quire.engineServiceName" -}}
{{ include "quire.engineName" . }}{{ if .Values.leaderWorkerSet.enabled }}-leaders{{ end }}
{{- end -}}

{{- define "quire.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{ default (include "quire.fullname" .) .Values.serviceAccount.name }}
{{- else -}}
{{ default "default" .Values.serviceAccount.name }}
{{- end -}}
{{- end -}}

{{- define "quire.image" -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end -}}

{{/* Labels that select pods; they never change. Call with (dict "root" $ "component" "engine"). */}}
{{- define "quire.selectorLabels" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride | trunc 63 }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* Labels of the pods that answer clients: all engines, or the leaders of a LeaderWorkerSet. */}}
{{- define "quire.serverLabels" -}}
{{ include "quire.selectorLabels" (dict "root" . "component" "engine") }}
quire-role: server
{{- end -}}

{{- define "quire.labels" -}}
{{ include "quire.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "quire.isAutoscaled" -}}
{{- if or .Values.autoscaling.hpa.enabled .Values.autoscaling.keda.enabled -}}true{{- end -}}
{{- end -}}

{{- define "quire.hasAutoscaler" -}}
{{- if and .Values.autoscaling.keda.enabled .Values.autoscaling.keda.autoscaler.enabled -}}true{{- end -}}
{{- end -}}

{{/* Arguments of `quire autoscale` beside the router. */}}
{{- define "quire.autoscalerArguments" -}}
- autoscale
- --router
- http://127.0.0.1:{{ .Values.router.port }}
- --serve
- 0.0.0.0:{{ .Values.autoscaling.keda.autoscaler.port }}
- --min-replicas
- {{ .Values.autoscaling.minReplicas | quote }}
- --max-replicas
- {{ .Values.autoscaling.maxReplicas | quote }}
{{- include "quire.optionArguments" .Values.autoscaling.keda.autoscaler.options }}
{{- end -}}

{{- define "quire.hasApiKey" -}}
{{- if or .Values.apiKey.existingSecret .Values.apiKey.value -}}true{{- end -}}
{{- end -}}

{{- define "quire.apiKeySecret" -}}
{{ default (printf "%s-api-key" (include "quire.fullname" .)) .Values.apiKey.existingSecret }}
{{- end -}}

{{- define "quire.apiKeyFrom" -}}
valueFrom:
  secretKeyRef:
    name: {{ include "quire.apiKeySecret" . }}
    key: {{ .Values.apiKey.key }}
{{- end -}}

{{/* One value of an option. Helm reads whole numbers as floats: 1e+09 must become 1000000000. */}}
{{- define "quire.scalar" -}}
{{- if kindIs "float64" . -}}
{{- if eq (floor .) . -}}{{ printf "%d" (int64 .) }}{{- else -}}{{ printf "%v" . }}{{- end -}}
{{- else -}}
{{ toString . }}
{{- end -}}
{{- end -}}

{{/* A map of options as arguments, sorted by name. A repeated option is given once for each value. */}}
{{- define "quire.optionArguments" -}}
{{- $repeated := list "alias" -}}
{{- range $name, $value := . }}
{{- if kindIs "bool" $value }}
- --{{ if not $value }}no-{{ end }}{{ $name }}
{{- else if kindIs "map" $value }}
- --{{ $name }}
- {{ toJson $value | quote }}
{{- else if kindIs "slice" $value }}
{{- if has $name $repeated }}
{{- range $value }}
- --{{ $name }}
- {{ include "quire.scalar" . | quote }}
{{- end }}
{{- else if $value }}
- --{{ $name }}
{{- range $value }}
- {{ include "quire.scalar" . | quote }}
{{- end }}
{{- end }}
{{- else }}
- --{{ $name }}
- {{ include "quire.scalar" $value | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Arguments of `quire serve`; the leader and the workers of a group have the same. */}}
{{- define "quire.engineArguments" -}}
- serve
- {{ .Values.model.name | quote }}
- --host
- 0.0.0.0
- --port
- {{ .Values.engine.port | quote }}
{{- if .Values.model.servedNames }}
- --served-model-name
{{- range .Values.model.servedNames }}
- {{ . | quote }}
{{- end }}
{{- end }}
- --start-timeout
- {{ .Values.engine.probes.startupSeconds | quote }}
- --drain-grace
- {{ .Values.engine.drain.graceSeconds | quote }}
- --drain-timeout
- {{ .Values.engine.drain.timeoutSeconds | quote }}
{{- if .Values.engine.dataVolume.enabled }}
- --data-dir
- /data
{{- end }}
{{- if .Values.leaderWorkerSet.enabled }}
- --tensor-parallel-size
- {{ .Values.leaderWorkerSet.size | quote }}
{{- end }}
{{- if and .Values.inferencePool.enabled (not (hasKey .Values.engine.options "metrics-names")) }}
- --metrics-names
- both
{{- end }}
{{- with .Values.engine.kvEvents }}
{{- if .enabled }}
- --kv-events-endpoint
- tcp://*:{{ .port }}
- --kv-events-replay-endpoint
- tcp://*:{{ .replayPort }}
{{- end }}
{{- end }}
{{- if .Values.prefill.enabled }}
- --role
- {{ default "decode" .Values.role }}
- --transfer-secret-file
- /tmp/transfer-secret
{{- if eq (default "decode" .Values.role) "prefill" }}
- --prefill-listen
- tcp://0.0.0.0:{{ .Values.prefill.port }}
{{- end }}
{{- end }}
{{- include "quire.optionArguments" .Values.engine.options }}
{{- end -}}

{{/* Arguments of `quire router`: engines have the stable names <engine>-0.<engine>, <engine>-1.<engine>, ... */}}
{{- define "quire.routerArguments" -}}
{{- $engine := include "quire.engineName" . -}}
{{- $count := ternary .Values.autoscaling.maxReplicas .Values.engine.replicas (eq (include "quire.isAutoscaled" .) "true") -}}
- router
- --host
- 0.0.0.0
- --port
- {{ .Values.router.port | quote }}
{{- range $index := until (int $count) }}
- --backend
- http://{{ $engine }}-{{ $index }}.{{ $engine }}:{{ $.Values.engine.port }}
{{- if $.Values.engine.kvEvents.enabled }}
- --kv-events
- {{ include "quire.kvEventSource" (dict "host" (printf "%s-%d.%s" $engine $index $engine) "engine" $.Values.engine) }}
{{- end }}
{{- end }}
{{- if .Values.prefill.enabled }}
{{- $prefill := include "quire.prefillName" . }}
{{- range $index := until (int .Values.prefill.replicas) }}
- --backend
- http://{{ $prefill }}-{{ $index }}.{{ $prefill }}:{{ $.Values.engine.port }}
{{- end }}
{{- end }}
- --drain-timeout
- {{ .Values.router.drain.timeoutSeconds | quote }}
{{- include "quire.optionArguments" .Values.router.options }}
{{- end -}}

{{/* An engine and its KV events, as `quire router --kv-events` takes them. Call with (dict "host" "a-0.a" "engine" .Values.engine). */}}
{{- define "quire.kvEventSource" -}}
http://{{ .host }}:{{ .engine.port }}=tcp://{{ .host }}:{{ .engine.kvEvents.port }},tcp://{{ .host }}:{{ .engine.kvEvents.replayPort }}
{{- end -}}

{{/* A probe of `path` that fails after `seconds`. Call with (dict "path" "/ready" "period" 5 "seconds" 60). */}}
{{- define "quire.probe" -}}
httpGet:
  path: {{ .path }}
  port: http
periodSeconds: {{ .period }}
timeoutSeconds: 5
failureThreshold: {{ max 1 (int (ceil (divf .seconds .period))) }}
{{- end -}}

{{/* What `fail` refuses because a schema cannot say it. */}}
{{- define "quire.check" -}}
{{- $values := .Values -}}
{{- if and $values.autoscaling.hpa.enabled $values.autoscaling.keda.enabled -}}
{{- fail "autoscaling.hpa.enabled and autoscaling.keda.enabled are both true: at most one of them may scale the engines" -}}
{{- end -}}
{{- if include "quire.hasAutoscaler" . -}}
{{- if not (and $values.router.enabled $values.router.adminKey.existingSecret (eq (int $values.router.replicas) 1)) -}}
{{- fail "autoscaling.keda.autoscaler.enabled needs router.enabled, router.adminKey.existingSecret and router.replicas 1" -}}
{{- end -}}
{{- end -}}
{{- if gt (int $values.autoscaling.minReplicas) (int $values.autoscaling.maxReplicas) -}}
{{- fail (printf "autoscaling.minReplicas must be at most autoscaling.maxReplicas, got %d and %d" (int $values.autoscaling.minReplicas) (int $values.autoscaling.maxReplicas)) -}}
{{- end -}}
{{- if $values.engine.kvEvents.enabled -}}
{{- if or (hasKey $values.engine.options "kv-events-endpoint") (hasKey $values.engine.options "kv-events-replay-endpoint") -}}
{{- fail "engine.options has kv-events-endpoint or kv-events-replay-endpoint, which engine.kvEvents.enabled sets: use one of them" -}}
{{- end -}}
{{- if gt (int (get $values.engine.options "data-parallel-size" | default 1)) 1 -}}
{{- fail "engine.kvEvents.enabled needs data-parallel-size 1 in engine.options, as each replica has ports of its own: raise engine.replicas" -}}
{{- end -}}
{{- if and $values.router.enabled (ne (get $values.router.options "policy" | default "prefix") "prefix") -}}
{{- fail "engine.kvEvents.enabled needs the policy prefix in router.options" -}}
{{- end -}}
{{- end -}}
{{- if and $values.apiKey.existingSecret $values.apiKey.value -}}
{{- fail "apiKey.existingSecret and apiKey.value are both set: set one of them" -}}
{{- end -}}
{{- if and (eq $values.model.storage.type "existingClaim") (not $values.model.storage.existingClaim) -}}
{{- fail "model.storage.existingClaim must name a claim when model.storage.type is existingClaim" -}}
{{- end -}}
{{- if and (ne $values.model.storage.type "existingClaim") $values.model.storage.existingClaim -}}
{{- fail (printf "model.storage.existingClaim is set, but model.storage.type is %s: set it to existingClaim" $values.model.storage.type) -}}
{{- end -}}
{{- if and (eq $values.model.storage.type "claimPerPod") (not $values.model.storage.size) -}}
{{- fail "model.storage.size must be set when model.storage.type is claimPerPod" -}}
{{- end -}}
{{- if $values.leaderWorkerSet.enabled -}}
{{- if $values.engine.gpu.count -}}
{{- fail (printf "engine.gpu.count is %d, but ranks of several pods run on CPUs only: set leaderWorkerSet.enabled to false, and tensor-parallel-size in engine.options for the GPUs of one pod" (int $values.engine.gpu.count)) -}}
{{- end -}}
{{- if eq $values.model.storage.type "claimPerPod" -}}
{{- fail "model.storage.type claimPerPod is not supported with leaderWorkerSet.enabled: use emptyDir or existingClaim" -}}
{{- end -}}
{{- if $values.engine.dataVolume.enabled -}}
{{- fail "engine.dataVolume.enabled is not supported with leaderWorkerSet.enabled" -}}
{{- end -}}
{{- end -}}
{{- if and $values.inferencePool.create (not $values.inferencePool.enabled) -}}
{{- fail "inferencePool.create needs inferencePool.enabled" -}}
{{- end -}}
{{- if and $values.inferencePool.create (not $values.inferencePool.endpointPicker.name) -}}
{{- fail "inferencePool.endpointPicker.name must be set when inferencePool.create is true" -}}
{{- end -}}
{{- if $values.prefill.enabled -}}
{{- if not $values.router.enabled -}}
{{- fail "prefill.enabled needs router.enabled: the router tells engines where prefill servers are" -}}
{{- end -}}
{{- if not (include "quire.hasApiKey" .) -}}
{{- fail "prefill.enabled needs apiKey.existingSecret or apiKey.value: with that key the router tells engines where prefill servers are" -}}
{{- end -}}
{{- if not $values.prefill.transferSecret.existingSecret -}}
{{- fail "prefill.enabled needs prefill.transferSecret.existingSecret: pages go between pods" -}}
{{- end -}}
{{- if or $values.leaderWorkerSet.enabled $values.engine.gpu.count -}}
{{- fail "prefill.enabled is not supported with leaderWorkerSet.enabled and engine.gpu.count: KV transfer needs CPUs, and all ranks in one pod" -}}
{{- end -}}
{{- end -}}
{{- $reserved := dict "model" "model.name" "host" "(fixed: 0.0.0.0)" "port" "engine.port" "api-key" "apiKey" "served-model-name" "model.servedNames" "start-timeout" "engine.probes.startupSeconds" "drain-grace" "engine.drain.graceSeconds" "drain-timeout" "engine.drain.timeoutSeconds" "data-dir" "engine.dataVolume" "uds" "(not supported)" "ssl-keyfile" "(not supported: probes and router use HTTP)" "ssl-certfile" "(not supported: probes and router use HTTP)" -}}
{{- if $values.leaderWorkerSet.enabled -}}
{{- $_ := set $reserved "tensor-parallel-size" "leaderWorkerSet.size" -}}
{{- end -}}
{{- if $values.prefill.enabled -}}
{{- range $name := list "role" "prefill-listen" "prefill-url" "transfer-secret-file" -}}
{{- $_ := set $reserved $name "prefill" -}}
{{- end -}}
{{- end -}}
{{- range $name, $value := $values.prefill.options -}}
{{- with get $reserved $name -}}
{{- fail (printf "prefill.options.%s is set by the chart; use the value %s" $name .) -}}
{{- end -}}
{{- end -}}
{{- range $name, $value := $values.engine.options -}}
{{- with get $reserved $name -}}
{{- fail (printf "engine.options.%s is set by the chart; use the value %s" $name .) -}}
{{- end -}}
{{- end -}}
{{- $reserved := dict "host" "(fixed: 0.0.0.0)" "port" "router.port" "backend" "engine.replicas" "admin-key" "router.adminKey" "backend-key" "apiKey" "drain-timeout" "router.drain.timeoutSeconds" -}}
{{- range $name, $value := $values.router.options -}}
{{- with get $reserved $name -}}
{{- fail (printf "router.options.%s is set by the chart; use the value %s" $name .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
