"""Turns the events of an engine into log lines, metrics, traces and charts."""
