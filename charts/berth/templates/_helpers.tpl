{{- /* An object that `helm uninstall` leaves: without it, clients lose the control plane. */}}
{{- define "berth.kept" }}
{{- $_ := set .metadata "annotations" (dict "helm.sh/resource-policy" "keep") }}
---
{{ toYaml . }}
{{- end }}

{{- define "berth.image" }}
{{- .Values.image
  | required "image has no default: set it to your own build of berth, such as registry.example/berth:v0.1.0" }}
{{- end }}

{{- /* Adds what examples/kustomize/cluster, pass and metrics do, and the variables of the values, to .shim and .pod. */}}
{{- define "berth.extend" }}
{{- $env := list }}
{{- if .Values.cluster.nodes }}
{{- $env = fromYamlArray (include "berth.cluster.env" .) }}
{{- $_ := set .pod "serviceAccountName" "berth" }}
{{- $_ := set .pod "volumes" (append .pod.volumes (fromYaml (include "berth.cluster.volume" .))) }}
{{- $_ := set .shim "volumeMounts" (append .shim.volumeMounts (fromYaml (include "berth.cluster.mount" .))) }}
{{- end }}
{{- $env = concat $env (include "berth.pass" . | fromYamlArray) }}
{{- with .Values.monitoring.port }}
{{- $env = append $env (dict "name" "BERTH_ADMIN" "value" (printf "$(BERTH_HOST_IP):%v" .)) }}
{{- end }}
{{- range $name, $value := .Values.env }}
{{- $env = append $env (dict "name" $name "value" $value) }}
{{- end }}
{{- $_ := set .shim "env" (concat .shim.env $env) }}
{{- end }}

{{- /* The variables of kube-apiserver and its shim for the value pass. */}}
{{- define "berth.pass" }}
{{- if eq .Values.pass "relay" }}[]{{ else }}
- name: BERTH_PASS
  value: {{ .Values.pass }}
{{- end }}
{{- end }}

{{- define "berth.cluster.env" }}
- name: BERTH_CLUSTER
  value: in-cluster
- name: BERTH_NODE_NAME
  valueFrom:
    fieldRef:
      fieldPath: spec.nodeName
{{- end }}

{{- define "berth.cluster.mount" }}
name: berth-account
mountPath: /var/run/secrets/kubernetes.io/serviceaccount
readOnly: true
{{- end }}

{{- define "berth.cluster.volume" }}
name: berth-account
projected:
  sources:
    - serviceAccountToken:
        path: token
    - configMap:
        name: kube-root-ca.crt
        items:
          - key: ca.crt
            path: ca.crt
{{- end }}
