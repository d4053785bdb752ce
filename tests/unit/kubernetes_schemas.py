"""JSON schemas of the kinds that are not Kubernetes' own, as far as deploy/ uses them; a field that is not here is refused.

Written after the custom resource definitions of LeaderWorkerSet 0.6, KEDA 2.14, the Prometheus operator 0.75 and the inference
extension 1.0 of the Gateway API. Pod templates are checked separately, as pods.
"""

from __future__ import annotations

from typing import Any

STRING = {"type": "string", "minLength": 1}
COUNT = {"type": "integer", "minimum": 0}
PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
DURATION = {"type": "string", "pattern": "^([0-9]+(ms|s|m|h))+$"}
LABELS = {"type": "object", "additionalProperties": {"type": "string", "maxLength": 63}}


def fields(required: str = "", **properties: Any) -> dict[str, Any]:
    """Return the schema of an object with these fields only. required: names with spaces between them."""
    return {"type": "object", "additionalProperties": False, "required": required.split(), "properties": properties}


def kind(api_version: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a whole object."""
    metadata = fields("name", name=STRING, labels=LABELS, annotations={"type": "object"})
    return fields(
        "apiVersion kind metadata spec", apiVersion={"const": api_version}, kind={"const": name}, metadata=metadata, spec=spec
    )


def listed(item: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a list that is not empty."""
    return {"type": "array", "minItems": 1, "items": item}


_TEMPLATE = fields("spec", metadata=fields(labels=LABELS, annotations={"type": "object"}), spec={"type": "object"})
_SELECTOR = fields("matchLabels", matchLabels=LABELS)
_SCALE_RULES = fields(
    stabilizationWindowSeconds=COUNT,
    policies=listed(
        fields("type value periodSeconds", type={"enum": ["Pods", "Percent"]}, value=COUNT, periodSeconds={"maximum": 1800})
    ),
)
_PROMETHEUS_TRIGGER = fields(
    "serverAddress query threshold",  # all values are text
    serverAddress={"type": "string", "pattern": "^https?://"},
    query=STRING,
    threshold={"type": "string", "pattern": "^[0-9.]+$"},
    ignoreNullValues={"enum": ["true", "false"]},
)
_METRICS_API_TRIGGER = fields(
    "url valueLocation targetValue",  # format is json by default
    url={"type": "string", "pattern": "^https?://"},
    valueLocation=STRING,
    targetValue={"type": "string", "pattern": "^[0-9.]+$"},
)
_TRIGGERS = [
    fields("type metadata", type={"const": "prometheus"}, metadata=_PROMETHEUS_TRIGGER),
    fields("type metadata", type={"const": "metrics-api"}, metadata=_METRICS_API_TRIGGER),
]

SCHEMAS = {
    "LeaderWorkerSet": kind(
        "leaderworkerset.x-k8s.io/v1",
        "LeaderWorkerSet",
        fields(
            "leaderWorkerTemplate",
            replicas=COUNT,
            startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
            leaderWorkerTemplate=fields(
                "workerTemplate",
                size={"type": "integer", "minimum": 1},
                restartPolicy={"enum": ["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]},
                leaderTemplate=_TEMPLATE,
                workerTemplate=_TEMPLATE,
            ),
        ),
    ),
    "ScaledObject": kind(
        "keda.sh/v1alpha1",
        "ScaledObject",
        fields(
            "scaleTargetRef triggers",
            scaleTargetRef=fields("name", apiVersion=STRING, kind=STRING, name=STRING),
            minReplicaCount=COUNT,
            maxReplicaCount=COUNT,
            pollingInterval=COUNT,
            advanced=fields(horizontalPodAutoscalerConfig=fields(behavior=fields(scaleDown=_SCALE_RULES))),
            triggers=listed({"oneOf": _TRIGGERS}),
        ),
    ),
    "ServiceMonitor": kind(
        "monitoring.coreos.com/v1",
        "ServiceMonitor",
        fields(
            "selector endpoints",
            selector=_SELECTOR,
            endpoints=listed(
                fields(
                    "port",
                    port=STRING,
                    path={"type": "string", "pattern": "^/"},
                    interval=DURATION,
                    authorization=fields("credentials", type=STRING, credentials=fields("name key", name=STRING, key=STRING)),
                )
            ),
        ),
    ),
    "PrometheusRule": kind(
        "monitoring.coreos.com/v1",
        "PrometheusRule",
        fields(
            "groups",
            groups=listed(
                fields(
                    "name rules",
                    name=STRING,
                    rules=listed(
                        fields(
                            "alert expr",
                            **{"for": DURATION},
                            alert=STRING,
                            expr=STRING,
                            labels=LABELS,
                            annotations={"type": "object"},
                        )
                    ),
                )
            ),
        ),
    ),
    "InferencePool": kind(
        "inference.networking.k8s.io/v1",
        "InferencePool",
        fields(
            "selector targetPorts endpointPickerRef",
            selector=_SELECTOR,
            targetPorts=listed(fields("number", number=PORT)),
            endpointPickerRef=fields("name port", name=STRING, port=fields("number", number=PORT)),
        ),
    ),
}
