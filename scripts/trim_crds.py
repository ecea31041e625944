"""Writes lib/ranklab/cluster/schemas/ from the CRDs: python scripts/trim_crds.py TRAINJOB JOBSET

TRAINJOB  github.com/kubeflow/trainer, manifests/base/crds/trainer.kubeflow.org_trainjobs.yaml
JOBSET    github.com/kubernetes-sigs/jobset, in config/components/crd/bases, jobset.x-k8s.io_*

The CRDs have 450 and 820 kB, because each inlines the pod template. Left out are descriptions, and
what is inside of the fields of LEFT, which may hold anything; the rest is turned into JSON Schema
that refuses unknown fields.
"""

import json
import sys
from pathlib import Path

import yaml

SOURCES = {
    "TrainJob": "kubeflow/trainer v2.3.0 and later, commit 8c0f5059b, August 2026",
    "JobSet": "kubernetes-sigs/jobset after v0.12.0, commit 08dfbdfd, August 2026",
}
LEFT = {
    "status", "initializer", "coordinator", "volumeClaimPolicies", "podFailurePolicy", "selector",
    "affinity", "dnsConfig", "ephemeralContainers", "initContainers", "hostAliases", "lifecycle",
    "livenessProbe", "readinessProbe", "startupProbe", "readinessGates",
    "topologySpreadConstraints",
    "securityContext", "resizePolicy", "restartPolicyRules", "valueFrom", "successPolicy",
    "awsElasticBlockStore", "azureDisk", "azureFile", "cephfs", "cinder", "csi", "downwardAPI",
    "ephemeral", "fc", "flexVolume", "flocker", "gcePersistentDisk", "gitRepo", "glusterfs",
    "nodeAffinity",
    "iscsi", "photonPersistentDisk", "portworxVolume", "projected", "quobyte", "rbd", "scaleIO",
    "storageos", "vsphereVolume", "resourceClaims", "schedulingGroup", "rules",
}
KEPT = ("type", "enum", "pattern", "minimum", "maximum", "minLength", "maxLength", "required")
NAME = {"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
METADATA = {"type": "object", "additionalProperties": False, "properties": {
    "name": NAME, "namespace": {"type": "string"}, "labels": TEXTS, "annotations": TEXTS}}


def trimmed(schema):
    """Return a node of openAPIV3Schema as JSON Schema."""
    out = {key: schema[key] for key in KEPT if key in schema}
    if schema.get("x-kubernetes-int-or-string"):
        out["type"] = ["integer", "string"]
    if schema.get("nullable"):
        out["type"] = [out["type"], "null"]
    if "properties" in schema:
        out["properties"] = {
            name: METADATA if name == "metadata" else {} if name in LEFT else trimmed(inner)
            for name, inner in schema["properties"].items()}
        out["additionalProperties"] = False
    elif isinstance(schema.get("additionalProperties"), dict):
        out["additionalProperties"] = trimmed(schema["additionalProperties"])
    if "items" in schema:
        out["items"] = trimmed(schema["items"])
    return out


def main(paths):
    folder = Path(__file__).parent.parent / "lib" / "ranklab" / "cluster" / "schemas"
    for path in paths:
        crd = yaml.safe_load(Path(path).read_text())["spec"]
        kind, (version,) = crd["names"]["kind"], [v for v in crd["versions"] if v["storage"]]
        schema = trimmed(version["schema"]["openAPIV3Schema"])
        schema["properties"]["apiVersion"] = {"const": f"{crd['group']}/{version['name']}"}
        schema["properties"]["kind"] = {"const": kind}
        schema["required"] = ["apiVersion", "kind", "metadata", "spec"]
        says = (f"Trimmed by scripts/trim_crds.py from the CRD of {SOURCES[kind]}. Apache-2.0, "
                "Copyright The Kubeflow Authors / The Kubernetes Authors")
        (folder / f"{kind.lower()}.json").write_text(json.dumps({"$comment": says} | schema) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
