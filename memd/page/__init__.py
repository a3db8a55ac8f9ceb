"""The page at `/` of the metrics' port: the daemon in pictures, for people without a Grafana."""
