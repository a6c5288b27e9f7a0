{{- /* What the pods have in common. Templates are called with the root as `root`, and `part`: which of the pods. */ -}}

{{- define "fairpate.labels" -}}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .part }}
{{- end }}

{{- define "fairpate.metadata" -}}
metadata:
  name: {{ .name }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    app.kubernetes.io/instance: {{ .root.Release.Name }}
    app.kubernetes.io/part-of: fairpate
{{- end }}

{{- /* Nobody is root, and no pod can talk to Kubernetes. 1000 and 100 are the image's user and group. */ -}}
{{- define "fairpate.pod" -}}
automountServiceAccountToken: false
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 1000
  runAsGroup: 100
  fsGroup: 100 # who owns what is written
  fsGroupChangePolicy: OnRootMismatch # else each start would open private files to the group
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "fairpate.container" -}}
image: {{ .root.Values.image }}
securityContext: {{ include "fairpate.rights" . }}
{{- end }}

{{- define "fairpate.rights" -}}
{allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}
{{- end }}

{{- define "fairpate.resources" -}}
{{- $amounts := printf "cpu: %q, memory: %s" .cpu .memory }}
{{- if .gpus }}{{ $amounts = printf "%s, nvidia.com/gpu: %q" $amounts (toString .gpus) }}{{ end -}}
resources:
  requests: { {{- $amounts -}} }
  limits: { {{- $amounts -}} }
{{- end }}

{{- /* Ray starts workers at nice 15; teachers are the work. Its metrics take no token, and its makers get no statistics. */ -}}
{{- define "fairpate.environment" -}}
- {name: RAY_worker_niceness, value: "0"}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
- {name: RAY_enable_metrics_collection, value: "0"}
- {name: XDG_CACHE_HOME, value: /tmp/cache}
{{- if include "fairpate.hasTokenFile" . }}
{{ include "fairpate.token.environment" . }}
{{- end }}
{{- end }}

{{- define "fairpate.certificate.environment" -}}
{{- if .root.Values.authoritySecret -}}
- {name: RAY_USE_TLS, value: "1"}
- {name: RAY_TLS_SERVER_CERT, value: /certificate/node.crt}
- {name: RAY_TLS_SERVER_KEY, value: /certificate/node.key}
- {name: RAY_TLS_CA_CERT, value: /certificate/ca.crt}
{{- end }}
{{- end }}

{{- /* Ray's token, as a file: KubeRay sets no variable that is there, and Ray reads the file where it is empty. KubeRay names the secret after the cluster; that of the student, whose name ends in chance, stays a variable. */ -}}
{{- define "fairpate.token.environment" -}}
- {name: RAY_AUTH_TOKEN, value: ""}
- {name: RAY_AUTH_TOKEN_PATH, value: /token/auth_token}
{{- end }}

{{- define "fairpate.token.mount" -}}
- {name: token, mountPath: /token, readOnly: true}
{{- end }}

{{- define "fairpate.token.volume" -}}
- {name: token, secret: {secretName: {{ .root.Release.Name }}, defaultMode: 0440}}
{{- end }}

{{- define "fairpate.hasTokenFile" -}}
{{- if hasPrefix "cluster-" .part }}yes{{ end }}
{{- end }}

{{- define "fairpate.mounts" -}}
- {name: tmp, mountPath: /tmp}
{{- if include "fairpate.hasTokenFile" . }}
{{ include "fairpate.token.mount" . }}
{{- end }}
{{- if .root.Values.authoritySecret }}
- {name: certificate, mountPath: /certificate, readOnly: true}
{{- end }}
{{- end }}

{{- define "fairpate.volumes" -}}
- {name: tmp, emptyDir: {}}
{{- if include "fairpate.hasTokenFile" . }}
{{ include "fairpate.token.volume" . }}
{{- end }}
{{- if .root.Values.authoritySecret }}
- {name: authority, secret: {secretName: {{ .root.Values.authoritySecret }}, defaultMode: 0440}}
- {name: certificate, emptyDir: {medium: Memory, sizeLimit: 1Mi}}
{{- end }}
{{- end }}

{{- /* Signs for the pod's own address; the head's also for the name by which KubeRay's pods look for it. */ -}}
{{- define "fairpate.certificate.container" -}}
{{- if .root.Values.authoritySecret -}}
initContainers:
  - name: certificate
    {{- include "fairpate.container" . | nindent 4 }}
    command: [fairpate, cluster, certificates, /authority, --node, /certificate, --address, $(POD_IP){{ if .isHead }}, --address, $(FQ_RAY_IP){{ end }}]
    env:
      - {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
    resources: {requests: {cpu: 200m, memory: 512Mi}, limits: {cpu: "1", memory: 512Mi}}
    volumeMounts:
      - {name: authority, mountPath: /authority, readOnly: true}
      - {name: certificate, mountPath: /certificate}
      - {name: tmp, mountPath: /tmp}
{{- end }}
{{- end }}

{{- define "fairpate.claim" -}}
{{- $volume := index .root.Values.volumes .name }}
{{- $volume.claim | default (printf "%s-%s" .root.Release.Name .name) }}
{{- end }}

{{- /* The autoscaler alone talks to Kubernetes: it gets the token of its account, and Ray, beside it, does not. */ -}}
{{- define "fairpate.autoscaler" -}}
enableInTreeAutoscaling: true
autoscalerOptions:
  idleTimeoutSeconds: {{ .idleTimeoutSeconds }}
  upscalingMode: Default
  securityContext: {{ include "fairpate.rights" . }}
  env:
    {{- include "fairpate.environment" . | nindent 4 }}
    {{- with include "fairpate.certificate.environment" . }}{{ . | nindent 4 }}{{ end }}
  volumeMounts:
    {{- include "fairpate.mounts" . | nindent 4 }}
    - {name: kubernetes, mountPath: /var/run/secrets/kubernetes.io/serviceaccount, readOnly: true}
{{- end }}

{{- define "fairpate.autoscaler.volume" -}}
- name: kubernetes
  projected:
    defaultMode: 0440
    sources:
      - serviceAccountToken: {path: token, expirationSeconds: 3600}
      - configMap: {name: kube-root-ca.crt, items: [{key: ca.crt, path: ca.crt}]}
      - downwardAPI: {items: [{path: namespace, fieldRef: {fieldPath: metadata.namespace}}]}
{{- end }}

{{- define "fairpate.redis" -}}
{{- with .root.Values.redis }}
{{- if .address -}}
gcsFaultToleranceOptions:
  redisAddress: {{ .address }}
  {{- if .passwordSecret }}
  redisPassword: {valueFrom: {secretKeyRef: {name: {{ .passwordSecret }}, key: password}}}
  {{- end }}
{{- end }}
{{- end }}
{{- end }}
