{{- define "whimbrel.fullname" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "whimbrel.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "whimbrel.labels" -}}
{{ include "whimbrel.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "whimbrel.metadata" -}}
name: {{ include "whimbrel.fullname" . }}
namespace: {{ .Release.Namespace }}
labels:
  {{- include "whimbrel.labels" . | nindent 2 }}
{{- end }}

{{- define "whimbrel.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (ternary (include "whimbrel.fullname" .) "default" .Values.serviceAccount.create) }}
{{- end }}
