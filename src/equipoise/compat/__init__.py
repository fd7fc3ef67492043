"""Drop-ins for the planners of serving engines; they live in `equipoise.balancer.compat`."""
