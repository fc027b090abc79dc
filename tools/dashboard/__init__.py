"""The generator of the Grafana dashboard that ships with ctxguard."""
