{{- define "compactor.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "compactor.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "compactor.selector" -}}
app.kubernetes.io/name: {{ include "compactor.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "compactor.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{ include "compactor.selector" . }}
{{- end -}}

{{/* Names of the service, and the values' own, as an array of TOML. */}}
{{- define "compactor.hostNames" -}}
{{- $name := include "compactor.fullname" . -}}
{{- $inside := printf "%s.%s" $name .Release.Namespace -}}
{{- concat (list $name $inside (printf "%s.svc" $inside) (printf "%s.svc.cluster.local" $inside)) .Values.service.hostNames | toJson -}}
{{- end -}}

{{- define "compactor.account" -}}
{{- default (include "compactor.fullname" .) .Values.serviceAccount.name -}}
{{- end -}}
