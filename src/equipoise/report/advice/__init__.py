"""What an operator is advised: a model of recorded load on given hardware, not a measurement."""
