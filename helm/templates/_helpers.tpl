{{/* Objects are called <release>-initwarm-seed, never `initwarm` alone; cut so that a pod's index still fits 63 characters. */}}
{{- define "initwarm.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $whole := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- printf "%s-seed" ($whole | trunc 45 | trimSuffix "-") -}}
{{- end -}}
{{- end -}}

{{/* The spec of a Job cannot be changed, so other values make another Job. */}}
{{- define "initwarm.job" -}}
{{- printf "%s-%s" (include "initwarm.fullname" .) (printf "%s%s" .Chart.Version (toJson .Values) | sha256sum | trunc 8) -}}
{{- end -}}

{{- define "initwarm.selectorLabels" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: seed
{{- end -}}

{{- define "initwarm.labels" -}}
{{ include "initwarm.selectorLabels" . }}
app.kubernetes.io/part-of: initwarm
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "initwarm.image" -}}
{{- $repository := required "Set image.repository to an image with initwarm on top of your serving image (see the Dockerfile)." .Values.image.repository -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" $repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" $repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}
{{- end -}}

{{- define "initwarm.claim" -}}
{{- default (include "initwarm.fullname" .) .Values.persistence.existingClaim -}}
{{- end -}}
