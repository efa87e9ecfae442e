"""Export Prometheus metrics of the HTTP side and of the cluster."""
