"""The report of `equipoise route-report`: what a proxy's log of requests says, in pictures."""
