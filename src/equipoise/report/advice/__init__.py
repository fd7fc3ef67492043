"""Advice for operators: a model of recorded load on given hardware, not a measurement."""
