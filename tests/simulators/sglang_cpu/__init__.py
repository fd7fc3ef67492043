"""SGLang without a GPU: its own balancer of experts, over gloo; see eplb_manager.py."""
