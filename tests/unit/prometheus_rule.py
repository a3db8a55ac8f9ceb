"""Writes deploy/kubernetes/base/prometheus-rule.yaml: the alerts, as the Prometheus operator takes
them.

Run: python -m tests.unit.prometheus_rule
"""

from __future__ import annotations

from pathlib import Path

_DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = _DEPLOY / "prometheus" / "rules.yml"
PAGE = _DEPLOY / "kubernetes" / "base" / "prometheus-rule.yaml"
HEAD = """# deploy/prometheus/rules.yml for the Prometheus operator; `make regenerate` writes it.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: memd
  namespace: memd
  labels:
    app.kubernetes.io/name: memd
spec:
"""


def generate() -> str:
    rules = RULES.read_text(encoding="utf-8")
    lines = rules[rules.index("groups:") :].splitlines()
    return HEAD + "".join(f"  {line}\n" if line else "\n" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(generate(), encoding="utf-8")
