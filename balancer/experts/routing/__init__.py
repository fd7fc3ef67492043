"""Routing tables, and the routers that read them."""
