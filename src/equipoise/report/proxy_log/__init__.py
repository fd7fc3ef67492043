"""The report of `equipoise route-report`: what the proxy's request log says."""
