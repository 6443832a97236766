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

{{/* Pods of the endpoint have another name than those of the daemon, whose service, policy and budget select by it. */}}
{{- define "compactor.serve.name" -}}
{{- printf "%s-serve" (include "compactor.fullname" . | trunc 57 | trimSuffix "-") -}}
{{- end -}}

{{- define "compactor.serve.selector" -}}
app.kubernetes.io/name: {{ printf "%s-serve" (include "compactor.name" . | trunc 57 | trimSuffix "-") }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "compactor.serve.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{ include "compactor.serve.selector" . }}
{{- end -}}

{{/* All replicas for [serve] nodes, as an array of TOML. */}}
{{- define "compactor.serve.nodes" -}}
{{- $serve := .Values.serve -}}
{{- if and $serve.addresses (ne (len $serve.addresses) (int $serve.replicas)) -}}
{{- fail (printf "serve.addresses has %d addresses for %d replicas" (len $serve.addresses) (int $serve.replicas)) -}}
{{- end -}}
{{- $name := include "compactor.serve.name" . -}}
{{- $nodes := list -}}
{{- range $number := until (int $serve.replicas) -}}
{{- $address := printf "%s-%d.%s.%s.svc:%d" $name $number $name $.Release.Namespace (int $serve.port) -}}
{{- if $serve.addresses -}}
{{- $address = index $serve.addresses $number -}}
{{- end -}}
{{- $nodes = append $nodes (printf "%d@%s" $number $address) -}}
{{- end -}}
{{- $nodes | toJson -}}
{{- end -}}
