"""An endpoint picker of the Gateway API Inference Extension: Envoy asks where a request goes."""
