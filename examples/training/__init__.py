"""How the shipped model was made: sources, corpus, training, figures."""
