"""Decides where expert weights and requests go."""
