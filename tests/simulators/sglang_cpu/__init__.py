"""SGLang without a GPU: its own balancer of experts, over gloo; see fetch.py and manager.py."""
